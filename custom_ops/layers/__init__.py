"""What lies around attention: ``embedding``, ``rms_norm``, ``act_and_mul``, ``gate_heads`` and ``linear``,
with checks, fakes, reference and kernels."""
