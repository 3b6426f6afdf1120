"""Attention over cached latents (multi-head latent attention), and the write of latents into their pool."""
