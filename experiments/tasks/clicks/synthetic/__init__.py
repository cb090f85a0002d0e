"""Generated rows with a planted model, whose best AUC is known."""
