"""The best of a random number of private runs, of which nothing else is seen: `dpsgd.select`."""
