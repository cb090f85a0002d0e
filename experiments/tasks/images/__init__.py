"""Images by class: scikit-learn's digits, NumPy archives, or TensorFlow data sets."""
