"""Sweeps: many runs from one file, and their joint results (`dpsgd sweep`)."""
