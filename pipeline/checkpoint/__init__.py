"""Checkpoints: saving, copies, and what a run must share with the one it resumes."""
