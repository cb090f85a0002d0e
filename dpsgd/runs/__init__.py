"""Runs that survive their machine: ledger, checkpoints, exports."""
