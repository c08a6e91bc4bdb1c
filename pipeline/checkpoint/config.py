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
    """`loss`, `nll`, `demd` or `divergence` (means over the validation sets), `SET/nll` of one set, or
    `task:NAME`, the accuracy of checkpoints on a task that `emo watch` evaluates."""
    patience: int = Field(3, gt=0)
    """End the run after this many validations in a row without a new lowest value, or for `task:NAME`, scored
    checkpoints without a new highest accuracy."""


class SavingConfig(Section):
    """The keys of `train` that set when and where checkpoints are saved."""

    save_steps: int = mark(FREE, 500, ge=0)
    """Steps between checkpoints. 0 saves only at the end or when stopped."""
    save_total_limit: int = mark(FREE, 2, gt=0)
    """Number of newest complete checkpoints to keep."""
    keep_every: int = mark(FREE, 0, ge=0)
    """Also keep checkpoints whose step is a multiple of this number."""
    async_save: bool = mark(FREE, True)
    """Write checkpoints while training continues, from a copy in host memory (14 bytes per parameter over all
    ranks)."""
    copy_to: str | None = mark(FREE, None)
    """Store to which every checkpoint is copied: s3://, gs:// or a directory. If output_dir is missing, the
    run resumes from this store."""
    export_checkpoints: bool = mark(FREE, False)
    """Put an export for Hugging Face into each checkpoint."""
    keep_best: Metric | None = mark(FREE, None)
    """Save a checkpoint at every new lowest value of this metric, and keep the best one: `loss`, `nll`,
    `demd` or `divergence` (means over the validation sets), or `SET/nll`. `task:NAME` keeps the checkpoint
    with the highest accuracy on a task that `emo watch` evaluates."""
    load_best_at_end: bool = mark(FREE, False)
    """Export the best checkpoint instead of the last one."""
    early_stopping: EarlyStopping | None = mark(FREE, None)
    """End the run when a validation metric has stopped improving."""
