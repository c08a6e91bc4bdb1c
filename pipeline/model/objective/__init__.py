"""The objective of a run: its recipe section and the loss built from it."""
