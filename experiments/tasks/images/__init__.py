"""Images of some classes: scikit-learn's digits, or a data set of TensorFlow's."""
