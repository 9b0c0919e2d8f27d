"""Memory of a training step: what there is, what a step will take, which layers recompute or offload their activations."""
