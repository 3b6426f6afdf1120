"""What `bench_attention.py` measures beside torchpaged's backends.

contenders.py   plain PyTorch, and the list of all;  libraries.py: FlashInfer, FlashAttention-3
in_parts.py     mixed batches cut in two;  plot.py: time against the roofline
"""
