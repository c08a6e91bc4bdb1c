"""Checks and predictions before training: the recipe, memory, speed and hosts."""
