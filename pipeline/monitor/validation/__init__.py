"""What a run measures between steps: validation sets, sampled texts and the best checkpoint."""
