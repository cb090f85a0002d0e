"""Ratings of films, and models trained privately for whole users."""
