"""The objective of a run: its recipe section, the loss built from it, and its live teacher."""
