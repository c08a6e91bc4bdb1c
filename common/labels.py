"""The ignore index of labels."""

IGNORE = -100  # label of a position that predicts nothing
