"""Phrases of some classes, read as words or pieces of words by a small transformer."""
