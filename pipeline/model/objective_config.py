"""The section `objective` of a recipe: what training minimises."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from emo.common.config.objective_names import objective_hint, parse_objectives, registered_objectives
from emo.common.config.recipe import Section
from emo.common.errors import nearest


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


def label_of(weight: float | RampConfig, name: str) -> str:
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
    known = parse_objectives(Path(__file__).parents[1] / "loss")
    if name not in known:
        if ":" in name or name in registered_objectives():
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
        return " + ".join(label_of(p.weight, p.name) for p in self.sum) if self.sum else self.name

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
