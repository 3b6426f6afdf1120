"""The constants of ``decode.cu``."""

from torchpaged.custom_ops.attention.cuda.call_params import CALL_CONSTANTS
from torchpaged.custom_ops.cuda.config import Constant, Table

DECODE = Table(
    "decode_config.cuh",
    ("decode.cu",),
    "8 requests of Llama 3 8B",
    (
        *CALL_CONSTANTS,
        Constant("PAIR_HEADS", "int", "kv heads of a pair, 1 or 2"),
        Constant("QUERY_LEN", "int", "most query tokens of a request, a power of two"),
        Constant("KV_BYTES", "int", "of a cached number; 1: fp8"),
        Constant("Q_HALF", "bool", "q and out are float16, else bfloat16"),
        Constant("HALF", "bool", "tensor cores multiply float16 (fp8 caches: always), else bfloat16"),
        Constant("K_BLOCK", "long long", "strides of the caches, in numbers: k_cache, block"),
        Constant("K_SLOT", "long long", "k_cache, slot of a block"),
        Constant("K_HEAD", "long long", "k_cache, kv head"),
        Constant("V_BLOCK", "long long", "v_cache, block"),
        Constant("V_SLOT", "long long", "v_cache, slot of a block"),
        Constant("V_HEAD", "long long", "v_cache, kv head"),
        Constant("SAME_MASK", "bool", "all query rows of a request see the same keys"),
        Constant("SCALES", "bool", "keys and values have scales"),
        Constant("PDL", "bool", "launched early: programmatic dependent launch"),
        Constant("DECODE_LEN", "int", "with more query tokens: the prefill launch's; 0: no such launch"),
        Constant("WARPS", "int", "of a CTA; each owns WARP_KEYS keys of a tile"),
        Constant("WARP_KEYS", "int", "of one warp in a tile, a multiple of 16"),
        Constant("STAGES", "int", "tiles on their way or in use, per warp"),
        Constant("CTAS_PER_SM", "int", "that registers must suffice for"),
        Constant("MIN_TILES", "int", "least tiles of a CTA's run"),
        Constant("ONE_WARP_SCHEDULES", "macro", "one warp finds the run for its CTA; chooses its way"),
        Constant("ASKED", "int", "requests of a lane whose lengths are then read in one trip to memory"),
        Constant("TEAM", "int", "CTAs that read neighbouring pairs of a request side by side"),
        Constant("NEAR", "int", "tiles that a border of runs may move to an end of a pair; 0: none moves"),
        Constant("ASK_EARLY", "bool", "a run's next queries are asked for while states of warps meet"),
        Constant("GROUPED", "bool", "pairs may have so many splits that they are merged in two steps"),
        Constant("PREFETCH", "int", "stages that may be filled while the kernels ahead still run"),
        Constant("PREFETCH_L2", "int", "tiles behind these that are asked for into L2 meanwhile"),
        Constant("CLUSTER", "macro", "CTAs of a cluster, a power of two; chooses an attribute"),
        Constant("MAX_REGISTERS", "macro", "0: as many as CTAS_PER_SM leaves; chooses an attribute"),
    ),
)
