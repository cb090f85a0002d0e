"""Finished models: reading with their guarantee, prediction, and export without secrets."""
