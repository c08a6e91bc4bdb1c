"""The loss in Hugging Face's Trainer, in TRL and in any loop: see `emo.pipeline.loss.models.hf`."""

from emo.pipeline.loss.models.hf import EMOLoss, FusedLossMixin, fuse_causal_lm, loss_function

__all__ = ["EMOLoss", "FusedLossMixin", "fuse_causal_lm", "loss_function"]
