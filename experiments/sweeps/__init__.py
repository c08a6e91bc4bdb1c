"""Experiment files: run every configuration and gather a table."""
