"""Loads or builds a model in the declared dtypes, attaches a LoRA adapter, and saves adapters."""
