"""The constants of the kernels of ``linear``, and of ``norm.cu``."""

from torchpaged.custom_ops.cuda.config import Constant, Table

LINEAR = Table(
    "linear_config.cuh",
    ("linear.cu", "linear_wide.cu", "linear_large.cu", "linear_sum.cu"),
    "the output projection of Llama 3 8B for up to 64 tokens on Hopper",
    (
        Constant("OUT_FEATURES", "int", "rows of the weight"),
        Constant("IN_FEATURES", "int", "columns of the weight"),
        Constant("W_ROW", "long long", "linear.cu: stride of the weight's rows, in numbers"),
        Constant("HALF", "bool", "float16, else bfloat16"),
        Constant("ACTIVATION", "int", "0: none; of gate, up: 1 silu, 2 gelu (tanh), 3 gelu (erf)"),
        Constant("NORM", "bool", "linear.cu: x is RMS-normalised on its way in"),
        Constant("BIAS", "bool", "a number per column of out is added"),
        Constant("SCALED", "bool", "a float32 number per column multiplies it and its bias"),
        Constant("RESIDUAL", "bool", "a tensor of out's shape is added"),
        Constant("ALIGNED", "bool", "4 neighbours of out, residual, bias lie at 8-byte multiples"),
        Constant("PDL", "bool", "launched early: programmatic dependent launch"),
        Constant("LAUNCH_FIRST", "bool", "linear.cu: the next kernel may start with this one"),
        Constant("X_ROWS", "int", "linear.cu: tokens that shared memory has room for"),
        Constant("NT", "int", "groups of 8 tokens that are multiplied"),
        Constant("MT", "int", "tiles of 16 rows per warp; wide: of 64 per CTA; large: of 64 per warpgroup"),
        Constant("ROW_WARPS", "int", "warps, or warpgroups of linear_large.cu, with rows of their own"),
        Constant("K_WARPS", "int", "linear.cu: such groups of a CTA; chunks go round them"),
        Constant("STAGES", "int", "chunks of k on their way or in use, per group"),
        Constant("EARLY_STAGES", "int", "wide, large: of them, before the kernels ahead have ended"),
        Constant("CTAS_PER_SM", "int", "that registers must suffice for"),
        Constant("K_PARTS", "int", "linear_large.cu: CTAs that share out a tile's k, and leave parts"),
        Constant("CLUSTER", "macro", "CTAs that share a tile's k; chooses an attribute"),
    ),
)

NORM = Table(
    "norm_config.cuh",
    ("norm.cu",),
    "a norm of Llama 3 8B",
    (
        Constant("IN_FEATURES", "int", "width of a token's row"),
        Constant("WEIGHT_BYTES", "int", "of a number of the weight: 2 as x, 4: float32"),
        Constant("THREADS", "int", "of a CTA, which has one row"),
        Constant("HALF", "bool", "x and out are float16, else bfloat16"),
        Constant("PDL", "bool", "launched early: programmatic dependent launch"),
    ),
)
