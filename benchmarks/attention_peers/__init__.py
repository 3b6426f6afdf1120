"""What `bench_attention.py` measures.

cases.py       named batches, their useful bytes and FLOPs;  suites.py: all suites
random_cases.py  batches that no suite has, from a seed
inputs.py      the tensors of a case: rotated, shuffled KV caches, and the float32 oracle
contender.py   what is measured on a case, and torchpaged's backends as such
contenders.py  plain PyTorch, and the list of all;  libraries.py: FlashInfer, FlashAttention-3
in_parts.py    mixed batches cut in two;  plot.py: time against the roofline
case.py        one case;  run.py: one run;  options.py: what it is given
summary.py     ratios, and the table with them"""
