"""What runs came to, for people."""
