"""Implements fine-tuning of causal language models. It reads rows of tokens, computes the loss that
the objective defines, and generates sample answers.
"""
