"""Recipes: configuration files with typed sections."""
