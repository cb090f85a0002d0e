"""One file a law: the certified price of each way to draw batches."""
