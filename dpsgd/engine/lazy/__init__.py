"""Lazy tables: a step reads a few of their rows, and defers the noise of the others."""
