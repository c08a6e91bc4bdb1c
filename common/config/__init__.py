"""Recipes: typed sections of a configuration."""
