"""What `bench_attention.py` measures next to torchpaged's backends.

contenders.py   plain PyTorch, and the list of all;  libraries.py: FlashInfer, FlashAttention-3
in_parts.py     mixed batches cut in two;  plot.py: time against the roofline
suites.py       all suites;  summary.py: ratios, and the table with them
"""
