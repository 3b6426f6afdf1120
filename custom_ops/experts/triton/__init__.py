"""The ops of mixtures of experts in Triton."""
