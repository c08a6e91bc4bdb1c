"""Command lines: parsing, progress."""
