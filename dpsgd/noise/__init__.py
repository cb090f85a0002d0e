"""Noise and the keys that name it."""
