"""What a run measures besides its training steps: validation sets, sampled texts and the best checkpoint."""
