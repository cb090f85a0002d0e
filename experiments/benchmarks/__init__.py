"""Measured figures beside their bars: `scripts/bench NAME --json FILE`; a module for each NAME."""
