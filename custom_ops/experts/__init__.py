"""Mixtures of experts for few tokens: ``route_experts`` and ``apply_experts``, with checks, fakes, reference
and kernels."""
