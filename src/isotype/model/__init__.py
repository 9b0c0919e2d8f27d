"""Models and adapters: loads or builds a model in the declared dtypes, attaches LoRA, saves adapters."""
