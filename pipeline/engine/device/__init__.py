"""The GPUs, cores and memory that a run has, and measurements of them."""
