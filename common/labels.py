"""The one mark on a label that every room understands."""

IGNORE = -100  # label of a position that predicts nothing
