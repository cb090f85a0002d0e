"""Data on many machines, by Apache Beam: stores of many raw files, and batches in step order."""
