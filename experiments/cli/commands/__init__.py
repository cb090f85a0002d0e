"""The commands of `dpsgd`, one module each: what can be asked, and `run`, which answers.

A module imports what it needs to parse its arguments; NumPy, JAX and the rest wait for `run`.
"""
