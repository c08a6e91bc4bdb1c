"""The objectives and the fused head as a library that needs torch alone: see `emo.pipeline.loss`."""

from emo.pipeline.loss import *  # noqa: F403
from emo.pipeline.loss import __all__ as __all__
