"""Results on disk, and statistics over them."""
