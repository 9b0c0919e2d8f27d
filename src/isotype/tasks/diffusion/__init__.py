"""Fine-tuning of diffusion models: it reads pictures with captions, computes a loss for each noised
latent, and draws sample pictures.
"""
