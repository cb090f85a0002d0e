"""Finished models: read back with their guarantee, exported without secrets, and asked."""
