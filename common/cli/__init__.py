"""Command-line parsing and progress."""
