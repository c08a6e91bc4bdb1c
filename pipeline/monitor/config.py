"""The keys of a recipe that say what a run logs, measures and watches for."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeInt, model_validator

from emo.common.config.recipe import FREE, Section, mark


class ProfileConfig(Section):
    """Steps that torch.profiler records into `profile/` of the run directory, on GPUs with their memory."""

    steps: tuple[int, int]
    """First and last step, from 1."""
    ranks: list[NonNegativeInt] = Field([0], min_length=1)
    """Ranks that record them."""

    @model_validator(mode="after")
    def _in_order(self) -> ProfileConfig:
        if not 1 <= self.steps[0] <= self.steps[1]:
            raise ValueError("profile.steps names the first and last step to record, from 1")
        return self


class MonitorConfig(Section):
    """The keys of `train` that say what a run logs, measures and watches for."""

    logging_steps: int = mark(FREE, 10, gt=0)
    """Steps between records in metrics.jsonl."""
    eval_steps: int = mark(FREE, 0, ge=0)
    """Steps between validations; 0 measures only before the first and after the last step."""
    eval_rows: int = mark(FREE, 512, gt=0)
    """Rows of each validation set at most."""
    sample_prompts: list[str] = mark(FREE, [])
    """Texts that the model continues before the first step and at every save."""
    sample_tokens: int = mark(FREE, 64, gt=0)
    """Tokens of each continuation."""
    report_to: list[Literal["tensorboard", "wandb"]] = mark(FREE, [])
    """Where metrics go besides metrics.jsonl: TensorBoard events, Weights & Biases."""
    project: str = mark(FREE, "emo")
    """Project of Weights & Biases."""
    profile: ProfileConfig | None = mark(FREE, None)
    """Steps and ranks that torch.profiler records."""
    max_skipped: int = mark(FREE, 5, gt=0)
    """The run ends after this many steps in a row without a finite gradient."""
    spike_factor: float = mark(FREE, 0.0, ge=0)
    """A loss this many times the usual one is a spike; 0 turns detection off."""
    spike_stops: bool = mark(FREE, False)
    """A spike ends the run; false only records it."""
