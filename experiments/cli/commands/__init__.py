"""Functions that carry out the commands of `dpsgd`; each module is imported when called."""
