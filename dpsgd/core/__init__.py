"""The types that all parts of a run share."""
