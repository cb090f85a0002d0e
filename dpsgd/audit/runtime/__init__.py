"""Checks the program that trains, by its trace and its releases."""
