"""Audits whether a run satisfies the assumptions of its guarantee."""
