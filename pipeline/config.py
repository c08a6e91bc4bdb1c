"""The typed run configuration: one tree, unknown keys refused, and the batch equation.

A recipe (YAML) plus `key=value` overrides becomes a `RunConfig`. Every default of training lives here.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import yaml
from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeInt,
    ValidationError,
    model_validator,
)

from emo.common.errors import UserError, nearest
from emo.common.objective_names import objective_hint, registered, written_objectives
from emo.common.recipe import Section, mark, parse_section, read_recipe
from emo.common.text import counted
from emo.data_prep.config import DataConfig

FREE = "free"  # marks fields that may change when a run resumes: none of them changes what is learned
Decay = Annotated[float, Field(ge=0, lt=1)]  # of a moving average


class LoraConfig(Section):
    """Low-rank adapters on the linear layers of the body; the head stays frozen."""

    r: int = Field(32, gt=0)
    """Rank of the adapters."""
    alpha: float = Field(default_factory=lambda given: 2.0 * given.get("r", 32), gt=0)
    """The adapters' output is scaled by alpha / r. The default is 2 r, as usual in TRL and LLaMA-Factory."""
    dropout: float = Field(0.05, ge=0, lt=1)
    """Dropout on the adapters' input."""
    targets: str | list[str] = "all-linear"
    """Names of the modules to adapt, or all-linear: every linear layer except the head."""


class ModelConfig(Section):
    """The model, and the form in which it trains.

    `path` alone: a pre-trained model. `architecture` alone: a new model. Both: a pre-trained model that must
    have this architecture, which also lets a dry run plan without network.
    """

    path: str | None = None
    """Hub id or directory of a pre-trained causal LM."""
    revision: str | None = None
    """Commit of the hub model."""
    architecture: dict[str, Any] | None = None
    """Keys of a Hugging Face configuration, with model_type: a new model, or what the pre-trained one must
    be."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of weights and activations; the optimizer keeps float32."""
    attn_implementation: Literal["auto", "varlen", "flash_attention_2", "sdpa", "eager"] = mark(FREE, "auto")
    """`varlen` is PyTorch's own variable-length attention, without a mask; `auto` takes the first of these
    that host and model family support."""
    activation_checkpointing: bool = mark(FREE, False)
    """Recompute activations in the backward pass: less memory, about a third more time."""
    compile: bool = False
    """Use torch.compile, on GPUs: on the whole model under ZeRO-1 or 2, on each layer under ZeRO-3; the first
    step then takes a minute."""
    kernels: Literal["liger"] | None = mark(FREE, None)
    """Compute RMSNorm, rotary embedding and the gated product of each layer by Liger's kernels, on GPUs, for
    the families that it knows; they are compared with the model's own at every start."""
    lora: LoraConfig | None = None
    """Train low-rank adapters instead of all weights."""

    @model_validator(mode="after")
    def _some_origin(self) -> ModelConfig:
        if self.path is None and self.architecture is None:
            raise ValueError("give path (pre-trained), architecture (a new model), or both")
        if "model_type" not in (self.architecture or {"model_type": ""}):
            raise ValueError("architecture needs model_type, for example llama")
        if self.kernels is not None and self.compile:
            raise ValueError("give kernels or compile, which fuse the same work")
        return self


class RampConfig(Section):
    """A number that moves in a straight line over the first steps and then stays."""

    model_config = ConfigDict(serialize_by_alias=True)

    first: float = Field(alias="from", description="Value at the first step.")
    to: float = Field(description="Value from step `steps` on.")
    steps: int = Field(gt=0, description="Steps that the way takes.")


def _as_ramp(weight: Any) -> Any:
    """Return a weight that is written as a ramp as a Ramp, so that its mistakes are named."""
    if not isinstance(weight, dict):
        return weight
    try:
        return RampConfig.model_validate(weight)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None


Weight = Annotated[float | RampConfig, BeforeValidator(_as_ramp)]


def _as_share(weight: float | RampConfig) -> float | RampConfig:
    """Return a share of the steps, checked."""
    if not all(0 <= end <= 1 for end in ends(weight)) or not any(ends(weight)):
        raise ValueError("give a number in [0, 1], or a ramp between two, that is not 0 throughout")
    return weight


Share = Annotated[Weight, AfterValidator(_as_share)]


def ends(weight: float | RampConfig) -> tuple[float, float]:
    """Return the first and the last value of a number or ramp."""
    return (weight.first, weight.to) if isinstance(weight, RampConfig) else (weight, weight)


def _labelled(weight: float | RampConfig, name: str) -> str:
    """Return words such as `0.5 emo`, or `(0.5 to 0) mle`."""
    first, last = ends(weight)
    return f"({first:g} to {last:g}) {name}" if isinstance(weight, RampConfig) else f"{first:g} {name}"


class TeacherConfig(Section):
    """A model whose distributions a divergence compares with: live, or its stored log-probabilities."""

    model: str | None = None
    """Hub id or directory of a causal LM with the tokenizer of the data; it stays frozen."""
    revision: str | None = None
    """Commit of the hub model."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Type of its weights; that of the model which trains, unless given."""
    temperature: float = Field(1.0, gt=0)
    """Its logits are divided by this."""
    scores: str | None = None
    """Instead of a model: what `emo score --top-k K` wrote beside the data."""

    @model_validator(mode="after")
    def _one_source(self) -> TeacherConfig:
        if (self.model is None) == (self.scores is None):
            raise ValueError("give model, or scores, or the word base")
        if self.scores is not None and (self.temperature != 1.0 or self.revision or self.dtype):
            raise ValueError("scores are as they were stored: leave temperature, revision and dtype out")
        return self


BASE = "base"  # the teacher that is the model before training
COSTS = ("pretrained", "live", "constant", "permuted", "numbers")  # without a file or a model of their own


def _as_teacher(value: Any) -> Any:
    """Return a teacher as it is written, checked, so that its mistakes are named."""
    if value is None or value == BASE or isinstance(value, TeacherConfig):
        return value
    if not isinstance(value, dict):
        raise ValueError("give {model: PATH}, {scores: NAME} or the word base")
    for key in value:
        if key not in TeacherConfig.model_fields:
            raise ValueError(f"unknown key {key}; {nearest(str(key), TeacherConfig.model_fields)}")
    try:
        return TeacherConfig.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(f"{where}: {first['msg']}" if where else str(first["ctx"]["error"])) from None


Teachers = Annotated[TeacherConfig | Literal["base"] | None, BeforeValidator(_as_teacher)]


def _check_objective(name: str, params: dict[str, float]) -> None:
    """Raise ValueError for an objective or an option that does not exist; programs are checked later."""
    known = written_objectives(Path(__file__).parent / "loss")
    if name not in known:
        if ":" in name or name in registered():
            return
        raise ValueError(f"unknown objective {name!r}; {objective_hint(name, known)}")
    for key in params.keys() - known[name]:
        hint = nearest(key, known[name]) if known[name] else "it has no parameters"
        raise ValueError(f"unknown parameter {key!r} of objective {name}; {hint}")


class PartConfig(Section):
    """One objective of a weighted sum."""

    name: str
    """Name of the objective."""
    params: dict[str, float] = {}
    """Its own parameters."""
    weight: Weight = 1.0
    """Its weight in the sum; a ramp {from, to, steps} moves it in a straight line over the first steps."""
    share: Share = 1.0
    """Share of the steps in which it counts, evenly spaced; or a ramp."""
    cost: str | None = None
    """The cost embedding, for clarity only: all parts share the one of the sum."""
    teacher: Teachers = None
    """The teacher of a divergence; all parts share one, which may stand beside the sum instead."""

    @model_validator(mode="after")
    def _exists(self) -> PartConfig:
        _check_objective(self.name, self.params)
        return self


class OnPolicyConfig(Section):
    """Steps in which a teacher judges what the model itself writes (GKD, arXiv 2306.13649)."""

    share: Share
    """Share of the steps, evenly spaced; or a ramp {from, to, steps}."""
    tokens: int = Field(128, gt=0)
    """Most tokens that are written after each prompt."""
    temperature: float = Field(1.0, gt=0)
    """The logits are divided by this before a token is drawn."""


class ObjectiveConfig(Section):
    """The loss to minimise; docs/objectives.md has the names and their parameters.

    Besides those, `name` may be FILE.py:FUNCTION, MODULE:FUNCTION, or what an installed package registers.
    """

    name: str = "emo"
    """Name of the objective; FILE.py:FUNCTION, MODULE:FUNCTION and what an installed package registers also
    work."""
    params: dict[str, float] = {}
    """Its own parameters, for example {ratio_cap: 3}."""
    sum: list[PartConfig] | None = Field(None, min_length=1)
    """A weighted sum of objectives, computed in one pass, instead of name and params."""
    scores: str | None = None
    """Scores that `emo score` wrote beside the data, for objectives that compare with another
    model (psft, excess)."""
    teacher: Teachers = None
    """Of a divergence: {model: PATH}, {scores: NAME}, or `base`: the model before training."""
    on_policy: OnPolicyConfig | None = None
    """Steps in which the model continues the prompts of the batch itself, and a live teacher judges that."""
    cost: str = "pretrained"
    """The cost embedding: `pretrained` (the head of model.path before training), `live` (the head as it
    trains), or a model directory, hub id or tensor file. Two controls: `constant` (every other token costs
    1) and `permuted` (the pretrained costs, with tokens exchanged by cost_seed). `numbers` uses the
    distance of values between tokens that are numbers, on a logarithmic scale above 9. Ignored by objectives
    without costs."""
    cost_seed: int = 0
    """Seed of `permuted`."""
    cost_cache_mb: float = Field(0.0, ge=0)
    """Memory for cost rows of frequent targets: faster, with gradients off by less than 2e-3. 0 computes
    every row exactly."""
    z_loss: float = Field(0.0, ge=0)
    """Weight of (log sum exp of the logits)^2, which keeps logits from drifting."""
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    """Share of the target's probability that is spread over the vocabulary."""

    @property
    def compared(self) -> Teachers:
        """Return the teacher of the objective, wherever it is named."""
        parts = (self, *(self.sum or ()))
        return next((part.teacher for part in parts if part.teacher is not None), None)

    @property
    def lives(self) -> bool:
        """Return whether the teacher is a model that goes through every batch."""
        teacher = self.compared
        return teacher is not None and not (isinstance(teacher, TeacherConfig) and teacher.model is None)

    @property
    def columns(self) -> str | None:
        """Return the name of the scores that training reads."""
        return self.compared.scores if isinstance(self.compared, TeacherConfig) else self.scores

    @property
    def label(self) -> str:
        """Return the objective's name in plans, cards and reports."""
        return " + ".join(_labelled(p.weight, p.name) for p in self.sum) if self.sum else self.name

    @model_validator(mode="after")
    def _one_way(self) -> ObjectiveConfig:
        _check_objective(self.name, self.params)
        if self.sum and (self.name, self.params) != ("emo", {}):
            raise ValueError("give name and params, or sum, not both")
        if {part.cost for part in self.sum or ()} - {None, self.cost}:
            raise ValueError("the parts of a sum share one cost embedding: set cost beside the sum")
        teachers = [part.teacher for part in (self, *(self.sum or ())) if part.teacher is not None]
        if any(teacher != teachers[0] for teacher in teachers):
            raise ValueError("the parts of a sum share one teacher: set it beside the sum")
        if isinstance(self.compared, TeacherConfig) and self.compared.scores and self.scores:
            raise ValueError("a run reads one set of scores: leave scores or teacher.scores out")
        if self.on_policy is not None and not self.lives:
            reason = "stored scores know the data's tokens alone" if self.compared else "nobody would judge"
            raise ValueError(f"on_policy needs teacher: {{model: PATH}} or base: {reason}")
        return self


class MixtureConfig(Section):
    """The shares of the domains in what a run trains on, over time.

    Every domain keeps an order of its own: each of its rows is seen once before any is seen twice.
    """

    shares: dict[str, Weight] = {}
    """Share of each domain: a number, or a ramp {from: 0.3, to: 0.1, steps: 1000} that begins where the
    mixture begins to hold. Shares need not add up to 1."""
    temperature: float | None = Field(None, gt=0)
    """Instead of shares: each domain in proportion to amount ** (1 / temperature)."""
    by: Literal["tokens", "rows"] = "tokens"
    """What shares and amounts count: supervised tokens or rows."""
    max_epochs: dict[str, int] = {}
    """Passes over a domain at most; afterwards the other domains share its part in proportion."""

    @model_validator(mode="after")
    def _possible(self) -> MixtureConfig:
        if bool(self.shares) == (self.temperature is not None):
            raise ValueError("give exactly one of shares and temperature")
        for end in zip(*map(ends, self.shares.values()), strict=True):  # in the beginning, in the end
            if min(end) < 0 or not any(end):
                raise ValueError("shares must not be negative, and not all of them 0")
        if min(self.max_epochs.values(), default=1) < 1:
            raise ValueError("max_epochs must be above 0; a share of 0 leaves a domain out")
        return self

    @property
    def label(self) -> str:
        """Return words such as `(0.3 to 0.1) general + 0.7 abroad, by tokens`."""
        parts = " + ".join(_labelled(share, name) for name, share in self.shares.items())
        most = ", ".join(f"{counted(epochs, 'epoch')} of {name}" for name, epochs in self.max_epochs.items())
        text = f"{parts or f'temperature {self.temperature:g}'}, by {self.by}"
        return f"{text}; at most {most}" if most else text


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


class TrainConfig(Section):
    """Optimisation, and when to look, save and stop."""

    num_train_epochs: float | None = Field(None, gt=0)
    """Passes over the data; give this or max_steps. The last step is filled up with rows of the next pass, so
    that every row is seen. With a mixture it is left out."""
    max_steps: int | None = Field(None, gt=0)
    """Optimizer steps; give this or num_train_epochs."""
    global_batch_size: int = Field(16, gt=0)
    """Rows per optimizer step over all ranks."""
    micro_batch_size: int = mark(FREE, 4, gt=0)
    """Rows per forward pass and rank."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """`muon` takes the matrices of the body and leaves embeddings, head, biases and norms to AdamW; the
    logged gradient norm is then that of the update."""
    learning_rate: float = Field(2e-5, gt=0, le=1e6)
    """Peak learning rate of AdamW."""
    muon_lr: float | None = Field(None, gt=0, le=1e6)
    """Peak learning rate of Muon, usually about 0.02; same schedule."""
    head_lr_ratio: float = Field(1.0, ge=0, le=1e3)
    """Learning rate of the output head over that of other weights; 0 leaves it as it is. A tied embedding is
    the head, too."""
    lr_scheduler_type: Literal["cosine", "linear", "constant"] = "cosine"
    """Decay of the learning rate after the warm-up."""
    warmup_ratio: float = Field(0.03, ge=0, lt=1)
    """Share of the steps over which the learning rate rises."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay."""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """AdamW's averages of gradient and squared gradient."""
    eps: float = Field(1e-8, gt=0)
    """AdamW's epsilon."""
    max_grad_norm: float = Field(1.0, ge=0)
    """Largest gradient norm; 0 does not clip."""
    mixture: MixtureConfig | None = None
    """Shares of the data's domains. Without one, each epoch is one permutation of all rows. A run keeps its
    mixture; a new one may hold from a checkpoint on, see mixture_from."""
    mixture_from: int | None = mark(FREE, None, ge=0)
    """Step of the checkpoint from which a changed mixture holds."""
    seed: int = Field(42, ge=0)
    """Seed of the data order, dropout, adapters and the weights of a new model."""
    logging_steps: int = mark(FREE, 10, gt=0)
    """Steps between records in metrics.jsonl."""
    eval_steps: int = mark(FREE, 0, ge=0)
    """Steps between validations; 0 measures only before the first and after the last step."""
    eval_rows: int = mark(FREE, 512, gt=0)
    """Rows of each validation set at most."""
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
    timeout_minutes: float = mark(FREE, 10, gt=0, le=1e5)
    """A step fails when a rank waits longer than this for another."""
    max_minutes: float | None = mark(FREE, None, gt=0)
    """Save and stop after this time, as at any request to stop."""
    max_skipped: int = mark(FREE, 5, gt=0)
    """The run ends after this many steps in a row without a finite gradient."""
    spike_factor: float = mark(FREE, 0.0, ge=0)
    """A loss this many times the usual one is a spike; 0 turns detection off."""
    spike_stops: bool = mark(FREE, False)
    """A spike ends the run; false only records it."""

    @model_validator(mode="after")
    def _consistent(self) -> TrainConfig:
        if (self.num_train_epochs is None) == (self.max_steps is None):
            either = "train.num_train_epochs=null or train.max_steps=null sets one aside"
            raise ValueError(f"give exactly one of num_train_epochs and max_steps: {either}")
        if (self.optimizer == "muon") != (self.muon_lr is not None):
            raise ValueError("optimizer muon needs muon_lr (0.02 is usual), which adamw does not read")
        if self.optimizer == "muon" and self.max_grad_norm:
            raise ValueError("optimizer muon needs max_grad_norm 0: its update would be clipped")
        return self


class RunConfig(Section):
    """A whole run: `data` for data_prep, the rest for the trainer."""

    output_dir: Path = mark(FREE)
    """Directory of the run: configuration, metrics, checkpoints, export."""
    data: DataConfig = mark(FREE)
    """What to tokenise; compared by the fingerprint of the prepared data."""
    model: ModelConfig
    """The model, and the form in which it trains."""
    objective: ObjectiveConfig = ObjectiveConfig()
    """What is minimised."""
    train: TrainConfig
    """Optimisation, validation, checkpoints and logging."""
    deepspeed: Path = mark(FREE, Path("ds_configs/zero3.json"))
    """DeepSpeed configuration, relative to the repository or the working directory; compared by content."""

    @model_validator(mode="after")
    def _trained(self) -> RunConfig:
        if self.model.lora is not None and self.train.head_lr_ratio != 1:
            raise ValueError(
                "train.head_lr_ratio=1 goes with model.lora, whose adapters leave the head alone"
            )
        return self


class Batch(NamedTuple):
    """The rows of a step: batch <= micro * accumulation * ranks, of which the last places may be empty."""

    batch: int
    micro: int
    accumulation: int
    ranks: int

    @property
    def places(self) -> int:
        """Return how many rows the passes of a step have room for."""
        return self.micro * self.accumulation * self.ranks

    def __str__(self) -> str:
        passes = f"{self.micro} per pass x {self.accumulation} accumulated x {counted(self.ranks, 'rank')}"
        empty = f", {counted(self.places - self.batch, 'place')} empty" if self.places > self.batch else ""
        return f"{self.batch} rows per step = {passes}{empty}"


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
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def solve_batch(batch: int, micro: int, ranks: int) -> Batch:
    """Return the fewest passes of at most `micro` rows that hold a batch, and the fewest rows for them.

    Raises UserError for a batch of fewer rows than ranks.
    """
    if batch < ranks:
        problem = f"train.global_batch_size={batch} leaves some of {ranks} ranks without a row"
        raise UserError(f"{problem}; set it to {ranks} or more, or start fewer ranks", code="batch-ranks")
    rows = math.ceil(batch / ranks)  # of a rank
    accumulation = math.ceil(rows / micro)
    return Batch(batch, math.ceil(rows / accumulation), accumulation, ranks)


def lr_at(train: TrainConfig, step: int, steps: int) -> float:
    """Return the learning rate of `step` (from 0) of `steps`: linear warm-up, then the schedule down to 0.

    The first step has a rate above 0, as in transformers' schedules shifted by one.
    """
    warmup = math.ceil(train.warmup_ratio * steps)
    if step < warmup:
        return train.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    if train.lr_scheduler_type == "cosine":
        return train.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))
    return (
        train.learning_rate * (1 - progress) if train.lr_scheduler_type == "linear" else train.learning_rate
    )
