"""Build, check and export the trained model."""
