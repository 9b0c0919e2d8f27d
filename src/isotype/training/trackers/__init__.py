"""Sends the values of metrics.jsonl to TensorBoard and Weights & Biases, each an extra. `available` imports no torch."""
