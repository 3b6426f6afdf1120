"""The constants of ``latent.cu``, ``latent_pairs.cu``, ``latent_fp8.cu`` and ``latent_merge.cu``."""

from torchpaged.custom_ops.cuda.config import Constant, Table

LATENT = Table(
    "latent_config.cuh",
    ("latent.cu", "latent_pairs.cu", "latent_fp8.cu", "latent_merge.cu"),
    "DeepSeek-V3 on eight GPUs",
    (
        Constant("RANK", "int", "columns of a latent, which are its value"),
        Constant("ROPE", "int", "columns of a rotated key, behind it"),
        Constant("NUM_HEADS", "int", "query heads"),
        Constant("BLOCK_SIZE", "int", "tokens of a block of the cache"),
        Constant("HALF", "bool", "numbers are float16, else bfloat16"),
        Constant("FP8", "bool", "rows of fp8"),
        Constant("CAUSAL", "bool", "no key behind a query's own position is seen"),
        Constant("LSE", "bool", "log-sum-exp is stored"),
        Constant("ROWS", "int", "query rows (tokens x heads) of a CTA"),
        Constant("STAGES", "int", "tiles of keys on their way or in use"),
        Constant("MIN_TILES", "int", "tiles of keys that a part of the work has at least"),
        Constant("MAX_GROUPS", "int", "parts that the work is cut into at most"),
        Constant("MERGE_SHARE", "int", "CTAs of the merge for each range"),
        Constant("CLUSTER", "macro", "CTAs that share a request; 1: ranges. Chooses an attribute"),
    ),
)
