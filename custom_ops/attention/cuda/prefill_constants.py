"""The constants of ``prefill.cu`` and ``prefill_merge.cu``."""

from torchpaged.custom_ops.attention.cuda.call_params import CALL_CONSTANTS
from torchpaged.custom_ops.cuda.config import Constant, Table

PREFILL = Table(
    "prefill_config.cuh",
    ("prefill.cu", "prefill_merge.cu"),
    "a causal Llama 3 8B",
    (
        *CALL_CONSTANTS,
        Constant("HALF", "bool", "q, out and what is multiplied are float16, else bfloat16"),
        Constant("KV_BYTES", "int", "of a cached number; 1: fp8, which is converted"),
        Constant("SCALES", "bool", "keys and values of fp8 have scales"),
        Constant("Q_FP8", "bool", "queries are e4m3 too, and multiplied as they are"),
        Constant("WARPGROUPS", "int", "warpgroups that multiply, 64 query rows each"),
        Constant("TILE_KV", "int", "keys of a step"),
        Constant("K_STAGES", "int", "steps' keys on their way or in use"),
        Constant("V_STAGES", "int", "steps' values on their way or in use"),
        Constant("Q_STAGES", "int", "tiles of queries on their way or in use"),
        Constant("RAW_STAGES", "int", "fp8: steps of keys or values that come or are converted; 0: no fp8"),
        Constant("DECODE_LEN", "int", "up to so many query tokens: the decode launch's; 0: none"),
        Constant("SPLIT", "bool", "few tiles are cut into splits, for prefill_merge.cu"),
        Constant("CASCADE", "bool", "prefixes of groups: all tiles are split, merged with the suffixes"),
        Constant("DEBUG_PATIENCE", "int", "tries before the producer gives up, for tests; 0: never"),
        Constant("DEBUG_EVERY_LANE", "bool", "all lanes arrive, not one for its warp; for racecheck"),
        Constant("DEBUG_BESIDE", "bool", "exponentials stand before the wait for the products"),
        Constant("DEBUG_CLOCKS", "macro", "1: cycles are counted; idle counters would move registers"),
    ),
)
