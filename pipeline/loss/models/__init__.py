"""The fused loss inside Hugging Face models."""
