"""Trains a task in a resumable run with ledger, checkpoints, report and export."""
