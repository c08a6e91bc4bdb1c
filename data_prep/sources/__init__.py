"""Readers of source files and data sets."""
