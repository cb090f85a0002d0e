"""Private selection: the best of a random number of private runs, see `dpsgd.select`."""
