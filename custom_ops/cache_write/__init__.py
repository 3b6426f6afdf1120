"""``write_kv`` and ``rope_write_kv``: contract, checks, fakes, reference and kernels."""
