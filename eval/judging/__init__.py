"""Instruction following: a model's answers, judges' verdicts on them, and what follows from the verdicts."""
