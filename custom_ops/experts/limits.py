"""Limits of the ops of mixtures of experts."""

#: Tokens that ``apply_experts`` takes: a program holds those of an expert at once.
MAX_TOKENS = 64
#: Experts of a token.
MAX_TOP_K = 32
