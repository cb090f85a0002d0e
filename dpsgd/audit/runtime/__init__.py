"""Checks of the program that trains, and of what a run resumes with."""
