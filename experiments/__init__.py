"""Studies: sweeps over recipes, and campaigns of several."""

import emo.common.packages  # noqa: F401 - before any other
