"""Evidence that what runs keeps what its guarantee assumes."""
