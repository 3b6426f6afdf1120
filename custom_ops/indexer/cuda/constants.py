"""The constants of ``top_k_indices.cu`` and of ``index_logits.cu``."""

from torchpaged.custom_ops.cuda.config import Constant, Table

TOP_K = Table(
    "top_k_config.cuh",
    ("top_k_indices.cu",),
    "4 rows of 131,072 logits on an H200",
    (
        Constant("VECTORS", "int", "groups of 4 logits that a thread holds"),
        Constant("CLUSTER", "macro", "CTAs that share a row; chooses an attribute"),
    ),
)

LOGITS = Table(
    "logits_config.cuh",
    ("index_logits.cu",),
    "DeepSeek-V3.2, keys of e4m3",
    (
        Constant("NUM_HEADS", "int", "heads of the indexer"),
        Constant("BLOCK_SIZE", "int", "tokens of a block of the cache"),
        Constant("HALF", "bool", "numbers of 16 bits are float16, else bfloat16"),
        Constant("FP8", "bool", "keys are e4m3 with a scale each, else of 16 bits"),
        Constant("CAUSAL", "bool", "no key behind a query's own position is seen"),
        Constant("WARPGROUPS", "int", "warpgroups of a CTA"),
        Constant("STAGES", "int", "tiles of keys on their way or in use, of each warpgroup"),
    ),
)
