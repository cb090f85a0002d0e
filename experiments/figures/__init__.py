"""The papers' figures, each from one command: `scripts/figures NAME OUT`."""
