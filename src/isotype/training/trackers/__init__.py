"""TensorBoard and Weights & Biases, each an extra: what metrics.jsonl gets, they get too. `available` imports no torch."""
