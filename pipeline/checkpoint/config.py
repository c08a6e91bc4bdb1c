"""The keys of a recipe for saving checkpoints."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from emo.common.config.recipe import FREE, Section, mark

TASK = "task:"  # begins a metric that `emo watch` measures
Metric = Annotated[str, Field(pattern=rf"^(([^/]+/)?(loss|nll|demd|divergence)|{TASK}.+)$")]


class EarlyStopping(Section):
    """When a run ends before its last step."""

    metric: Metric = "nll"
    """Metric of the validation sets: `loss`, `nll`, `demd` or `divergence`. `SET/nll` is the NLL of one set.
    `task:NAME` is the accuracy of checkpoints on a task of `emo watch`."""
    patience: int = Field(3, gt=0)
    """End the run after this many validations in a row without a new lowest value, or after this many scored
    checkpoints without a higher accuracy."""


class SavingConfig(Section):
    """The keys of `train` that set when and where checkpoints are saved."""

    save_steps: int = mark(FREE, 500, ge=0)
    """Steps between checkpoints. 0 saves only at the end or when stopped."""
    save_total_limit: int = mark(FREE, 2, gt=0)
    """Number of newest complete checkpoints to keep."""
    keep_every: int = mark(FREE, 0, ge=0)
    """Also keep the checkpoints of every this many steps. 0 keeps none of them."""
    async_save: bool = mark(FREE, True)
    """Write checkpoints while training continues, from a copy in host memory. It takes 14 bytes per parameter
    over all ranks and is reused by the next save. With export_checkpoints, rank 0 also holds the model in its
    dtype until the export is written and reloaded. false makes training wait."""
    copy_to: str | None = mark(FREE, None)
    """Store to which every checkpoint is copied: s3://, gs:// or a directory (fsspec). A run without its
    output_dir resumes from it."""
    export_checkpoints: bool = mark(FREE, False)
    """Put an export for Hugging Face into each checkpoint, for scheduled evaluation."""
    keep_best: Metric | None = mark(FREE, None)
    """Save a checkpoint at every validation with a new lowest value of this metric, and never delete the best
    one: `loss`, `nll`, `demd` or `divergence`, as a mean over the validation sets, or of one as `SET/nll`.
    `task:NAME` keeps the checkpoint with the highest accuracy on a task, as `emo watch` reports it. Up to
    save_total_limit more checkpoints are then kept until they have a score."""
    load_best_at_end: bool = mark(FREE, False)
    """Export the best checkpoint instead of the last one."""
    early_stopping: EarlyStopping | None = mark(FREE, None)
    """End the run when a validation metric has stopped improving."""
