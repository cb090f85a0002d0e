"""The commands of `dpsgd`, one module each, imported when called: `run` answers a question."""
