"""Diffusion models: pictures with captions, a loss for each noised latent, sampled pictures."""
