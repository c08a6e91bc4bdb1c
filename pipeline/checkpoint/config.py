"""The keys of a recipe for saving checkpoints."""

from __future__ import annotations

from emo.common.config.recipe import FREE, Section, mark


class SavingConfig(Section):
    """The keys of `train` that set when and where checkpoints are saved."""

    save_steps: int = mark(FREE, 0, ge=0)
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
