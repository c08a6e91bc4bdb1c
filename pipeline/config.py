"""The typed run configuration: one tree of sections, each defined by the package that reads it.

A recipe (YAML) plus `key=value` overrides becomes a `RunConfig`. Unknown keys are rejected. Each default of
training is in the section's own module.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import field_validator, model_validator

from emo.common.config.recipe import FREE, Section, dump_recipe, mark, parse_section, read_recipe
from emo.common.errors import UserError
from emo.common.io.objects import is_address
from emo.data_prep.config import DataConfig

from .batches.config import BatchConfig
from .checkpoint.config import TASK, SavingConfig
from .control.config import LimitsConfig
from .control.run_dir import INITIAL
from .engine.config import OptimizerConfig
from .model.config import ModelConfig
from .model.objective.config import BASE, ObjectiveConfig
from .monitor.config import MonitorConfig


class TrainConfig(LimitsConfig, MonitorConfig, SavingConfig, OptimizerConfig, BatchConfig):
    """Optimization, validation, checkpoints and logging."""


class RunConfig(Section):
    """A complete run: `data` for `emo prepare`, the other sections for `emo train`."""

    output_dir: Path = mark(FREE)
    """Directory of the run: configuration, metrics, checkpoints, export."""
    data: DataConfig = mark(FREE)
    """The data to tokenize. A resumed run may change only where the data are."""
    model: ModelConfig
    """The model to train."""
    objective: ObjectiveConfig = ObjectiveConfig()
    """The loss to minimize."""
    train: TrainConfig
    """Optimization, validation, checkpoints and logging."""
    deepspeed: Path = mark(FREE, Path("ds_configs/zero3.json"))
    """DeepSpeed configuration, relative to the repository or working directory. A resumed run may name
    another file with the same content."""

    @field_validator("output_dir")
    @classmethod
    def _is_local(cls, value: Path) -> Path:
        if is_address(str(value)):
            raise ValueError("a run needs a directory of this machine. train.copy_to copies it to a store")
        return value

    @model_validator(mode="after")
    def _trained(self) -> RunConfig:
        lora = self.model.lora
        if lora is None:
            return self
        for key, ordinary in (("head_lr_ratio", 1), ("only", None)):
            if getattr(self.train, key) != ordinary and not lora.train_embeddings:
                raise ValueError(f"train.{key} with model.lora needs model.lora.train_embeddings=true")
        if lora.train_embeddings and self.objective.average_decay is not None:
            raise ValueError("objective.teacher.ema does not average the embeddings of lora.train_embeddings")
        if self.objective.resolved_teacher == BASE and (lora.path is not None or lora.train_embeddings):
            what, where = ("adapter", "path") if lora.path is not None else ("embeddings", "train_embeddings")
            raise ValueError(
                f"objective.teacher=base is the model without the {what} of model.lora.{where}. "
                "Set objective.teacher={model: DIRECTORY} to the model before training"
            )
        return self

    @property
    def holds_base(self) -> bool:
        """Return whether the model before training is in memory, under adapters or as the teacher."""
        lora = self.model.lora
        under_adapters = lora is not None and not lora.train_embeddings and lora.path is None
        return under_adapters or self.objective.resolved_teacher == BASE

    @property
    def measures_kl(self) -> bool:
        """Return whether validations measure KL(base, model)."""
        k = self.train.kl_from_base
        return k != 0 and (k is not None or self.holds_base)

    @model_validator(mode="after")
    def _check_selection(self) -> RunConfig:
        train = self.train
        metrics = {"keep_best": train.keep_best}
        metrics["early_stopping"] = None if train.early_stopping is None else train.early_stopping.metric
        sets = self.data.validation_sets
        for key, metric in metrics.items():
            if metric is None:
                continue
            if metric.startswith(TASK):
                if not (train.export_checkpoints and train.save_steps):
                    raise ValueError(
                        f"train.{key}={metric} needs train.export_checkpoints=true and train.save_steps"
                    )
                continue
            name, _, measure = metric.rpartition("/")
            if not (train.eval_steps and sets):
                raise ValueError(f"train.{key} needs train.eval_steps and a validation set")
            if measure == "divergence" and self.objective.resolved_teacher is None:
                raise ValueError(f"train.{key}={metric} needs objective.teacher, which is not set")
            if name and name not in sets:
                raise ValueError(f"train.{key}={metric} names no validation set. There are {', '.join(sets)}")
        if train.load_best_at_end and train.keep_best is None:
            raise ValueError("train.load_best_at_end needs train.keep_best, for example nll")
        return self

    def initial_weights(self) -> tuple[str, str | None]:
        """Return the directory or hub id of the weights before training, and the commit of a hub model."""
        if self.model.path is None:
            return str(self.output_dir / INITIAL), None
        return self.model.path, self.model.revision


def load_config(path: Path, overrides: list[str]) -> RunConfig:
    """Return the resolved configuration of a recipe file with `key=value` overrides.

    Raises UserError for an objective in a file or package of one's own that no override names: a recipe may
    be somebody else's, and such an objective is a program.
    """
    config = parse_section(RunConfig, read_recipe(path, overrides), "")
    objectives = " ".join(override for override in overrides if override.startswith("objective"))
    for name in (config.objective.name, *(part.name for part in config.objective.sum or ())):
        if ":" in name and name not in objectives:
            cure = f"read it, then name it in the command: objective.name={name}"
            raise UserError(f"{path} names an objective that is a program; {cure}", code="objective-program")
    return config


def dump_config(config: RunConfig) -> str:
    """Return the resolved configuration as YAML that `load_config` reads back."""
    return dump_recipe(config.model_dump(mode="json"))


def flatten(tree: Mapping[str, Any], separator: str, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value of nested mappings with its path, as in `train.seed`."""
    for key, value in tree.items():
        inner = f"{path}{separator}{key}" if path else str(key)
        yield from flatten(value, separator, inner) if isinstance(value, dict) else [(inner, value)]
