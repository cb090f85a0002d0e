"""Results of runs: tables, figures and pages."""
