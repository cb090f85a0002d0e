"""One file a law: the certified privacy profile of each way to draw batches."""
