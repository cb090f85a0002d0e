"""Tables of which a step reads a few rows: what they are, and what noise does to the others."""
