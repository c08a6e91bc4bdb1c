"""Measurements of a run besides its training steps: validation sets, sampled texts and the best checkpoint."""
