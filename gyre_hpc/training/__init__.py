"""The model in training: gradients as sums over rows, and the core's optimizer."""
