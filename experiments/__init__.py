"""Experiments: sweeps over recipes, studies of known truths, and the evidence. Not part of the wheel."""

import emo.common.packages  # noqa: F401 - must come first
