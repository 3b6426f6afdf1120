"""The parts of ``bench_prefill_kernel.py``: cases, a case's tensors, what is done with them, and the
processes that do it."""
