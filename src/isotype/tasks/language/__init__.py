"""Fine-tuning of causal language models: it reads rows of tokens, computes a loss by an objective,
and generates sample answers.
"""
