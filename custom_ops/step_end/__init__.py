"""The end of a step: ``sample_tokens``, ``accept_tokens``, ``finish_step`` and ``advance_step``, with checks,
fakes, reference, kernels."""
