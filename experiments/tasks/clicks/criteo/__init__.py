"""Criteo's two public data sets: their raw files, line by line."""
