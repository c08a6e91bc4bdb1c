"""Training: from a recipe and prepared data to checkpoints and an exported model."""
