"""The keys of a recipe that say when and where checkpoints are saved."""

from __future__ import annotations

from emo.common.config.recipe import FREE, Section, mark


class SavingConfig(Section):
    """The keys of `train` that say when and where checkpoints are saved."""

    save_steps: int = mark(FREE, 0, ge=0)
    """Steps between checkpoints; 0 saves only at the end or when stopped."""
    save_total_limit: int = mark(FREE, 2, gt=0)
    """Number of newest complete checkpoints to keep."""
    keep_every: int = mark(FREE, 0, ge=0)
    """Also keep the checkpoints of every so many steps; 0 keeps none."""
    async_save: bool = mark(FREE, True)
    """Write checkpoints while training continues, from a copy in host memory: 14 bytes a parameter over all
    ranks, kept for the next save, and with export_checkpoints the whole model in its own dtype on rank 0
    until it is written and reloaded. false makes training wait."""
    copy_to: str | None = mark(FREE, None)
    """Copy every checkpoint there too: s3://, gs:// or a directory (fsspec). A run whose output_dir is not
    there resumes from it."""
    export_checkpoints: bool = mark(FREE, False)
    """Put an export for Hugging Face into each checkpoint, for scheduled evaluation."""
