"""Text from language models, and measures of it: sampling, likelihoods, closeness to human text."""
