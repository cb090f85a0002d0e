"""Users who hold many examples: ratings of films, and a model that is trained on whole users."""
