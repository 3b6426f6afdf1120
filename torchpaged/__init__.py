"""torchpaged: paged-KV attention for plain PyTorch, as custom ops, an nn.Module and a HuggingFace attention."""

__version__ = "0.1.0"
