"""Stores from, and as, data sets of TensorFlow Datasets."""
