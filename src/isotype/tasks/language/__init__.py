"""Causal language models: rows of tokens, a loss for each next token, sampled answers."""
