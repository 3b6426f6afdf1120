"""What a FlashAttention-3 wheel says of its build: as one that is on the package index."""

CONFIG = {
    "build_flags": {
        "FLASHATTENTION_DISABLE_BACKWARD": True,
        "FLASHATTENTION_DISABLE_PAGEDKV": False,
        "FLASHATTENTION_DISABLE_LOCAL": False,
        "FLASHATTENTION_DISABLE_SOFTCAP": True,
        "FLASHATTENTION_DISABLE_FP16": False,
        "FLASHATTENTION_DISABLE_HDIM64": False,
        "FLASHATTENTION_DISABLE_HDIM96": True,
        "FLASHATTENTION_DISABLE_HDIM128": False,
        "FLASHATTENTION_DISABLE_HDIM192": False,
        "FLASHATTENTION_DISABLE_HDIM256": False,
    }
}
