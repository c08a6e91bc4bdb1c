"""Sweeps: run every configuration of an experiment file and gather a table."""
