"""The algorithm, its loop, and the guarantee of what it did."""
