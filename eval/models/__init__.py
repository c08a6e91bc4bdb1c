"""The evaluated language model: the interface, Hugging Face models behind it, and sentence encoders."""
