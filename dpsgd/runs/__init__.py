"""Runs that survive their machine: any task, its ledger, checkpoints, report and export."""
