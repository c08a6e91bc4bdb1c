"""The typed run configuration: one tree, unknown keys refused, and the batch equation.

A recipe (YAML) plus `key=value` overrides becomes a `RunConfig`. Every default of training lives here.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import yaml
from pydantic import Field, ValidationError, create_model, field_validator, model_validator

from common.errors import UserError
from common.recipe import Section, mark, parse_section, read_recipe
from common.text import counted
from data_prep.config import DataConfig

FREE = "free"  # marks fields that may change when a run resumes: none of them changes what is learned
Decay = Annotated[float, Field(ge=0, lt=1)]  # of a moving average


class LoraConfig(Section):
    """Low-rank adapters on the linear layers of the body; the head stays frozen."""

    r: int = Field(32, gt=0)  # rank
    alpha: float = Field(16, gt=0)  # scale = alpha / r
    dropout: float = Field(0.05, ge=0, lt=1)
    targets: str | list[str] = "all-linear"  # module names, or every linear layer except the head


class ModelConfig(Section):
    """Which model, and in which form it trains.

    `path` alone: a pre-trained model. `architecture` alone: a new model. Both: a pre-trained model that must
    have this architecture, which also lets a dry run plan without network.
    """

    path: str | None = None  # hub id or directory of a pre-trained causal LM
    revision: str | None = None  # commit of the hub model
    architecture: dict[str, Any] | None = None  # Hugging Face configuration keys, with model_type
    dtype: Literal["float32", "bfloat16"] = "bfloat16"  # of weights and activations; optimizer: float32
    # varlen: torch's own, without a mask; the first of these that host and family have is `auto`
    attn_implementation: Literal["auto", "varlen", "flash_attention_2", "sdpa", "eager"] = mark(FREE, "auto")
    activation_checkpointing: bool = mark(FREE, False)
    compile: bool = False  # torch.compile, for GPUs under ZeRO-1 or 2; the first step then takes a minute
    lora: LoraConfig | None = None

    @model_validator(mode="after")
    def _some_origin(self) -> ModelConfig:
        if self.path is None and self.architecture is None:
            raise ValueError("give path (pre-trained), architecture (a new model), or both")
        if self.architecture is not None and "model_type" not in self.architecture:
            raise ValueError("architecture needs model_type, for example llama")
        return self


if TYPE_CHECKING:

    class RampConfig(Section):
        """See below; `from` is no name that Python allows here."""

        to: float
        steps: int
else:
    # A weight that moves in a straight line over the first steps, and stays where it arrives.
    RampConfig = create_model(
        "RampConfig",
        __base__=Section,
        **{"from": (float, ...), "to": (float, ...), "steps": (int, Field(gt=0))},
    )


def _as_ramp(weight: Any) -> Any:
    """What is written as a ramp is checked as one, so that its mistakes are named."""
    if not isinstance(weight, dict):
        return weight
    try:
        return RampConfig.model_validate(weight)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def _ends(weight: float | RampConfig) -> tuple[float, float]:
    """The first and the last value of a number or ramp."""
    return (getattr(weight, "from"), weight.to) if isinstance(weight, RampConfig) else (weight, weight)


def _labelled(weight: float | RampConfig, name: str) -> str:
    """As in `0.5 emo`, or `(0.5 to 0) mle`."""
    first, last = _ends(weight)
    return f"({first:g} to {last:g}) {name}" if isinstance(weight, RampConfig) else f"{first:g} {name}"


class PartConfig(Section):
    """One objective of a weighted sum."""

    name: str
    params: dict[str, float] = {}
    weight: float | RampConfig = 1.0
    cost: str | None = None  # for clarity only: all parts share the costs of the sum

    @field_validator("weight", mode="before")
    @classmethod
    def _ramp(cls, weight: Any) -> Any:
        return _as_ramp(weight)

    @property
    def label(self) -> str:
        """What it is called in a sum."""
        return _labelled(self.weight, self.name)


class ObjectiveConfig(Section):
    """What is minimised; docs/objectives.md has the names and their parameters.

    Besides those, `name` may be FILE.py:FUNCTION, MODULE:FUNCTION, or what an installed package registers.
    """

    name: str = "emo"
    params: dict[str, float] = {}  # the objective's own parameters, e.g. {ratio_cap: 3}
    # Instead of name and params: a weighted sum, computed in one pass.
    sum: list[PartConfig] | None = Field(None, min_length=1)
    # For objectives that compare with another model, such as psft and excess: the scores of that name, which
    # `python -m pipeline score` has written beside the data.
    scores: str | None = None
    # The cost embedding: `pretrained` (the head of model.path as it was before training), `live` (the
    # head as it trains), or a model directory, hub id or tensor file. Two controls: `constant` (every other
    # token costs 1, so that only an objective's reweighting is left) and `permuted` (the pretrained costs
    # between other tokens, by cost_seed). `numbers`: between tokens that are numbers the distance of their
    # values, else 0. Unused by objectives without costs.
    cost: str = "pretrained"
    cost_seed: int = 0
    # Memory for cost rows of frequent targets: faster, with gradients off by less than 2e-3. 0: exact.
    cost_cache_mb: float = Field(0.0, ge=0)
    z_loss: float = Field(0.0, ge=0)
    label_smoothing: float = Field(0.0, ge=0, lt=1)

    @property
    def label(self) -> str:
        """What it is called in plans, cards and reports."""
        return " + ".join(part.label for part in self.sum) if self.sum else self.name

    @model_validator(mode="after")
    def _one_way(self) -> ObjectiveConfig:
        if (
            self.sum
            and self.model_fields_set & {"name", "params"}
            and (self.name, self.params) != ("emo", {})
        ):
            raise ValueError("give name and params, or sum, not both")
        others = {part.cost for part in self.sum or ()} - {None, self.cost}
        if others:
            named = ", ".join(map(str, others))
            raise ValueError(f"the parts of a sum share one cost embedding: set cost, not {named} in a part")
        return self


class MixtureConfig(Section):
    """How much of each domain a run trains on, and when.

    Every domain keeps an order of its own: each of its rows is seen once before any is seen twice.
    """

    # Of each domain of the data: a number, or a ramp {from: 0.3, to: 0.1, steps: 1000}, which begins where
    # the mixture begins to hold. They need not add up to 1.
    shares: dict[str, float | RampConfig] = {}
    temperature: float | None = Field(None, gt=0)  # instead of shares: amount ** (1 / temperature)
    by: Literal["tokens", "rows"] = "tokens"  # what shares and amounts are of: supervised tokens, or rows
    # A domain that was seen so often gives its share to the others, in proportion to theirs.
    max_epochs: dict[str, int] = {}

    @field_validator("shares", mode="before")
    @classmethod
    def _ramps(cls, shares: Any) -> Any:
        return {name: _as_ramp(one) for name, one in shares.items()} if isinstance(shares, dict) else shares

    @model_validator(mode="after")
    def _possible(self) -> MixtureConfig:
        if bool(self.shares) == (self.temperature is not None):
            raise ValueError("give exactly one of shares and temperature")
        for name, share in self.shares.items():
            if min(_ends(share)) < 0:
                raise ValueError(f"the share of {name} must not be negative")
        for end in (0, 1) if self.shares else ():
            if not any(_ends(share)[end] for share in self.shares.values()):
                raise ValueError(f"the shares are all 0 {('in the beginning', 'in the end')[end]}")
        for name, epochs in self.max_epochs.items():
            if epochs < 1:
                raise ValueError(f"max_epochs of {name} must be above 0; a share of 0 leaves a domain out")
        return self

    @property
    def label(self) -> str:
        """As in `(0.3 to 0.1) general + 0.7 abroad, by tokens`."""
        parts = " + ".join(_labelled(share, name) for name, share in self.shares.items())
        most = ", ".join(f"{counted(epochs, 'epoch')} of {name}" for name, epochs in self.max_epochs.items())
        told = f"{parts or f'temperature {self.temperature:g}'}, by {self.by}"
        return f"{told}; at most {most}" if most else told


class TrainConfig(Section):
    """Optimisation, and when to look, save and stop."""

    epochs: float | None = Field(None, gt=0)  # passes over the data; or
    steps: int | None = Field(None, gt=0)  # optimizer steps
    batch: int = Field(16, gt=0)  # rows per optimizer step, over all ranks
    micro_batch: int = mark(FREE, 4, gt=0)  # rows per forward pass and rank
    # Muon takes the matrices of the body, at a rate of its own with the same schedule. AdamW keeps the rest:
    # embeddings, head, biases and the gains of norms. The gradient norm that is logged is then the update's.
    optimizer: Literal["adamw", "muon"] = "adamw"
    lr: float = Field(2e-5, gt=0)  # of AdamW
    muon_lr: float | None = Field(None, gt=0)  # usually about 0.02
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_ratio: float = Field(0.03, ge=0, lt=1)  # share of the steps
    weight_decay: float = Field(0.0, ge=0)
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    eps: float = Field(1e-8, gt=0)
    clip: float = Field(1.0, ge=0)  # gradient norm; 0 = no clipping
    # Shares of the data's domains; absent: all rows in one permutation per epoch. A run keeps its mixture;
    # another one may hold from a checkpoint on, whose step `mixture_from` then names.
    mixture: MixtureConfig | None = None
    mixture_from: int | None = mark(FREE, None, ge=0)
    seed: int = Field(42, ge=0)  # data order, dropout, and the weights of a new model
    log_every: int = mark(FREE, 10, gt=0)  # steps
    eval_every: int = mark(FREE, 0, ge=0)  # steps between validations; 0 = none between first and last
    eval_rows: int = mark(FREE, 512, gt=0)  # at most so many rows of each validation set
    save_every: int = mark(FREE, 0, ge=0)  # steps between checkpoints; 0 = only at the end or when stopped
    keep_last: int = mark(FREE, 2, gt=0)  # newest complete checkpoints that are kept; besides them
    keep_every: int = mark(FREE, 0, ge=0)  # those of every so many steps; 0 = none
    # Checkpoints are written while training continues, from a copy in host memory: 14 bytes a parameter over
    # all ranks, and with export_checkpoints the whole model in its own dtype on rank 0, until that is written
    # and again while it is reloaded. false: training waits.
    async_save: bool = mark(FREE, True)
    copy_to: str | None = mark(
        FREE, None
    )  # every checkpoint also goes there: s3://..., gs://..., a directory (fsspec)
    export_checkpoints: bool = mark(
        FREE, False
    )  # each checkpoint also holds an export, for scheduled evaluation
    sample_prompts: list[str] = mark(
        FREE, []
    )  # texts that the model continues at every save, before the first step too
    sample_tokens: int = mark(FREE, 64, gt=0)  # by so many tokens
    tensorboard: bool = mark(FREE, False)
    wandb: str | None = mark(FREE, None)  # project of Weights & Biases that gets the metrics
    profile: tuple[int, int] | None = mark(FREE, None)  # first and last step that torch.profiler records
    timeout_minutes: float = mark(
        FREE, 10, gt=0, le=1e5
    )  # a step in which a rank waits longer for another has failed
    max_minutes: float | None = mark(FREE, None, gt=0)  # then save and stop, as at any stop request
    max_skipped: int = mark(FREE, 5, gt=0)  # steps in a row without finite gradient before the run ends
    spike_factor: float = mark(FREE, 0.0, ge=0)  # a loss this many times the usual one is a spike; 0 = off
    spike_stops: bool = mark(FREE, False)  # a spike ends the run instead of being noted

    @model_validator(mode="after")
    def _consistent(self) -> TrainConfig:
        if (self.epochs is None) == (self.steps is None):
            one, other = (
                f"train.steps={self.steps or 'N'}",
                f"train.epochs={self.epochs or 'N'}".removesuffix(".0"),
            )
            if self.steps is not None:
                one, other = f"{one} train.epochs=null", f"{other} train.steps=null"
            raise ValueError(f"give exactly one of epochs and steps: {one}, or {other}")
        if (self.optimizer == "muon") != (self.muon_lr is not None):
            raise ValueError("optimizer muon needs muon_lr (0.02 is usual), which adamw does not read")
        if self.optimizer == "muon" and self.clip:
            raise ValueError("optimizer muon needs clip 0: DeepSpeed would clip its update, not the gradient")
        if self.profile is not None and not 1 <= self.profile[0] <= self.profile[1]:
            raise ValueError("profile names the first and last step to record, from 1")
        return self


class RunConfig(Section):
    """A whole run: `data` for data_prep, the rest for the trainer."""

    run_dir: Path = mark(FREE)
    data: DataConfig = mark(FREE)  # its content is compared by fingerprint
    model: ModelConfig
    objective: ObjectiveConfig = ObjectiveConfig()
    train: TrainConfig
    # Relative to the repository or the working directory; its content is compared.
    deepspeed: Path = mark(FREE, Path("ds_configs/zero3.json"))


class Batch(NamedTuple):
    """batch = micro * accumulation * ranks, in rows."""

    batch: int
    micro: int
    accumulation: int
    ranks: int

    def __str__(self) -> str:
        return (
            f"{self.batch} rows per step = {self.micro} per pass x {self.accumulation} accumulated "
            f"x {counted(self.ranks, 'rank')}"
        )


def load_config(path: Path, overrides: list[str]) -> RunConfig:
    """The resolved configuration of a recipe file with `key=value` overrides.

    Raises UserError for an objective in a file or package of one's own that no override names: a recipe may
    be somebody else's, and such an objective is a program.
    """
    config = parse_section(RunConfig, read_recipe(path, overrides), "")
    given = " ".join(one for one in overrides if one.startswith("objective"))
    for name in (config.objective.name, *(part.name for part in config.objective.sum or ())):
        if ":" in name and name not in given:
            raise UserError(
                f"{path} names an objective that is a program, {name}, and no recipe has one run by itself: "
                f"read it, then name it in the command: objective.name={name}"
            )
    return config


def dump_config(config: RunConfig) -> str:
    """The resolved configuration as YAML that `load_config` reads back."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def solve_batch(batch: int, micro: int, ranks: int) -> Batch:
    """Solve the batch equation for the accumulation steps.

    Raises UserError when no whole number fits, naming values that would.
    """
    if batch % ranks:
        raise UserError(
            f"train.batch={batch} does not divide over {counted(ranks, 'rank')}; "
            f"set train.batch={max(ranks, batch - batch % ranks)} or change the number of ranks"
        )
    per_rank = batch // ranks
    micro = min(micro, per_rank)
    if per_rank % micro:
        fits = max(d for d in range(1, micro + 1) if per_rank % d == 0)
        raise UserError(
            f"train.micro_batch={micro} does not divide the {per_rank} rows that each of "
            f"{counted(ranks, 'rank')} takes of train.batch={batch}; set train.micro_batch={fits}"
        )
    return Batch(batch, micro, per_rank // micro, ranks)


def total_steps(train: TrainConfig, rows: int) -> int:
    """Optimizer steps of the run: train.steps, or as many whole batches as the epochs hold.

    Raises UserError when the data are too few for one step.
    """
    if train.steps is not None:
        return train.steps
    assert train.epochs is not None
    steps = int(train.epochs * rows / train.batch)
    if steps == 0:
        raise UserError(
            f"{counted(rows, 'row')} x {counted(train.epochs, 'epoch')} are less than one batch of "
            f"{train.batch}; set a smaller train.batch or more train.epochs"
        )
    return steps


def lr_at(train: TrainConfig, step: int, steps: int) -> float:
    """Learning rate of step `step` (from 0) of `steps`: linear warm-up, then the schedule down to 0.

    The first step has a rate above 0, as in transformers' schedules shifted by one.
    """
    warmup = math.ceil(train.warmup_ratio * steps)
    if step < warmup:
        return train.lr * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    if train.schedule == "cosine":
        return train.lr * 0.5 * (1 + math.cos(math.pi * progress))
    if train.schedule == "linear":
        return train.lr * (1 - progress)
    return train.lr
