"""Evidence that what runs keeps what its price assumes."""
