"""Many runs from one file, and what they show together: `dpsgd sweep`."""
