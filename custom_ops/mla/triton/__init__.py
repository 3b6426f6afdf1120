"""Latent attention in Triton: attention over a pool of latents, the merge of its parts, and the write."""
