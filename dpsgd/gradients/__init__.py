"""Per-example gradients: clipped and summed in one pass."""
