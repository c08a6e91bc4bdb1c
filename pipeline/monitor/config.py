"""The keys of a recipe for logging, validation and checks of the losses."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeInt, model_validator

from emo.common.config.recipe import FREE, Section, mark


class ProfileConfig(Section):
    """Steps that torch.profiler records in `profile/` of the run directory, with the memory of GPUs."""

    steps: tuple[int, int]
    """First and last step to record, counted from 1."""
    ranks: list[NonNegativeInt] = Field([0], min_length=1)
    """Ranks that record these steps."""

    @model_validator(mode="after")
    def _check_order(self) -> ProfileConfig:
        if not 1 <= self.steps[0] <= self.steps[1]:
            raise ValueError("profile.steps must be the first and the last step to record, from 1")
        return self


class MonitorConfig(Section):
    """The keys of `train` for logging, validation and checks of the losses."""

    logging_steps: int = mark(FREE, 10, gt=0)
    """Steps between records in metrics.jsonl."""
    eval_steps: int = mark(FREE, 0, ge=0)
    """Steps between validations. 0 validates only before the first and after the last step."""
    eval_rows: int = mark(FREE, 512, gt=0)
    """Largest number of rows of each validation set."""
    kl_from_base: int | None = mark(FREE, None, ge=0)
    """Each validation measures KL(base, model), the divergence from the model before training. With LoRA
    (without `train_embeddings` or `path`) or `objective.teacher: base`, it is exact and always measured
    unless this is 0. Otherwise, set how many of the base model's most likely tokens to store per position,
    for example 64."""
    sample_prompts: list[str] = mark(FREE, [])
    """Texts that the model continues before the first step and at every save."""
    sample_tokens: int = mark(FREE, 64, gt=0)
    """Number of tokens of each continuation."""
    report_to: list[Literal["tensorboard", "wandb", "mlflow", "trackio"]] = mark(FREE, [])
    """Trackers that receive the metrics, in addition to metrics.jsonl."""
    project: str = mark(FREE, "emo")
    """Project in Weights & Biases and Trackio, experiment in MLflow."""
    profile: ProfileConfig | None = mark(FREE, None)
    """Steps and ranks that torch.profiler records."""
    max_skipped: int = mark(FREE, 5, gt=0)
    """End the run after this many steps in a row without a finite gradient."""
    spike_factor: float = mark(FREE, 0.0, ge=0)
    """A loss this many times the usual loss is a spike. 0 turns detection off."""
    spike_stops: bool = mark(FREE, False)
    """End the run at a spike, instead of only recording it."""
