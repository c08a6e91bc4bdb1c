"""The report of evaluations."""
