"""Selection of documents: deduplication, contamination, limits and splits."""
