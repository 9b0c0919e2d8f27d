"""Implements fine-tuning of diffusion models. It reads pictures with captions, computes a loss for
each latent with added noise, and generates sample pictures.
"""
