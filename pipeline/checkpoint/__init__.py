"""Checkpoints of a run, their copies, and checks before a resume."""
