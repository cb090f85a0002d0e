"""Checks that the draws of a sampler have the law that its privacy cost is about."""
