"""Which documents are kept: deduplication, contamination, limits and splits."""
