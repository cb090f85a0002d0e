"""Training on episodes: a drawn user's ratings are a task, split into support and query."""
