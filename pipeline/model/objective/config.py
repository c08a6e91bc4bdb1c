"""The section `objective` of a recipe: what training minimises."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from emo.common.config.objective_names import objective_hint, parse_objectives, registered_objectives
from emo.common.config.recipe import Section
from emo.common.errors import nearest

SectionType = TypeVar("SectionType", bound=Section)


def _parse(section: type[SectionType], tree: object) -> SectionType:
    """Validate a section inside a union, so that an error names its key, not all members of the union."""
    try:
        return section.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(f"{where}: {first['msg']}" if where else str(first["ctx"]["error"])) from None


class RampConfig(Section):
    """A number that changes linearly over the first steps and then stays constant."""

    model_config = ConfigDict(serialize_by_alias=True)

    first: float = Field(alias="from", description="Value at the first step.")
    to: float = Field(description="Value from step `steps` on.")
    steps: int = Field(gt=0, description="Number of steps of the change.")


def _parse_weight(value: Any) -> Any:
    return _parse(RampConfig, value) if isinstance(value, dict) else value


def _check_share(weight: float | RampConfig) -> float | RampConfig:
    if not all(0 <= end <= 1 for end in ends(weight)) or not any(ends(weight)):
        raise ValueError("give a number in [0, 1], or a ramp between two, that is not 0 throughout")
    return weight


Weight = Annotated[float | RampConfig, BeforeValidator(_parse_weight)]
Share = Annotated[Weight, AfterValidator(_check_share)]


def ends(weight: float | RampConfig) -> tuple[float, float]:
    """Return the first and the last value of a number or ramp."""
    return (weight.first, weight.to) if isinstance(weight, RampConfig) else (weight, weight)


def label_of(weight: float | RampConfig, name: str) -> str:
    """Return a label such as `0.5 emo` or `(0.5 to 0) mle`."""
    first, last = ends(weight)
    return f"({first:g} to {last:g}) {name}" if isinstance(weight, RampConfig) else f"{first:g} {name}"


class TeacherConfig(Section):
    """The teacher whose predictions a divergence compares with the model's."""

    model: str | None = None
    """Hub id or directory of a causal LM with the tokenizer of the data."""
    revision: str | None = None
    """Commit of the hub model."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Type of the teacher's weights, by default the type of the trained model."""
    temperature: float = Field(1.0, gt=0)
    """Divides the teacher's logits."""
    scores: str | None = None
    """Instead of a model: the name of scores that `emo score --top_k K` stored with the data."""
    ema: float | None = Field(None, ge=0, lt=1)
    """Instead of a model: the exponential average of the trained weights, with this decay. With 0, the
    teacher is the trained model itself and needs no memory."""

    @model_validator(mode="after")
    def _one_source(self) -> TeacherConfig:
        if sum(source is not None for source in (self.model, self.scores, self.ema)) != 1:
            raise ValueError("give exactly one of model, scores and ema, or the word base")
        if self.ema is not None and (self.revision or self.dtype):
            raise ValueError("an average has the weights of the trained model: remove revision and dtype")
        if self.scores is not None and (self.temperature != 1.0 or self.revision or self.dtype):
            raise ValueError("stored scores cannot be changed: remove temperature, revision and dtype")
        return self


BASE = "base"  # the teacher is the model before training
COSTS = ("pretrained", "live", "constant", "permuted", "numbers")  # cost embeddings that need no path


def _parse_teacher(value: Any) -> Any:
    if value is None or value == BASE or isinstance(value, TeacherConfig):
        return value
    if not isinstance(value, dict):
        raise ValueError("give {model: PATH}, {scores: NAME}, {ema: DECAY} or the word base")
    for key in value:
        if key not in TeacherConfig.model_fields:
            raise ValueError(f"unknown key {key}; {nearest(str(key), TeacherConfig.model_fields)}")
    return _parse(TeacherConfig, value)


Teachers = Annotated[TeacherConfig | Literal["base"] | None, BeforeValidator(_parse_teacher)]


def _check_objective(name: str, params: dict[str, float]) -> None:
    """Raise ValueError for an unknown objective or parameter. User-defined objectives are checked later."""
    known = parse_objectives(Path(__file__).parents[2] / "loss")
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
    """Parameters of the objective."""
    weight: Weight = 1.0
    """Weight in the sum: a number, or a ramp {from, to, steps} over the first steps."""
    share: Share = 1.0
    """Share of the steps in which this objective is used, evenly spaced."""
    teacher: Teachers = None
    """The teacher of a divergence. All parts share one, so it can also be set for the sum."""

    @model_validator(mode="after")
    def _exists(self) -> PartConfig:
        _check_objective(self.name, self.params)
        return self


class OnPolicyConfig(Section):
    """Steps that train on text that the model generates, with a teacher (GKD, arXiv 2306.13649)."""

    share: Share
    """Share of the steps that use generated text, evenly spaced."""
    tokens: int = Field(128, gt=0)
    """Largest number of tokens to generate after each prompt."""
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature of the generated text."""
    context: Literal["prompt", "demonstration"] = "prompt"
    """What the teacher reads before the generated text. `prompt`: only the prompt. `demonstration`: the
    prompt with its answer from the data, then the prompt again (SDFT, arXiv 2601.19897), with the teacher
    `base` or {ema: DECAY}."""


class ObjectiveConfig(Section):
    """The loss to minimize. docs/reference/objectives.md lists the names and their parameters."""

    name: str = "emo"
    """A built-in objective, FILE.py:FUNCTION, MODULE:FUNCTION, or a name that an installed package
    registers."""
    params: dict[str, float] = {}
    """Parameters of the objective, for example {ratio_cap: 3}."""
    sum: list[PartConfig] | None = Field(None, min_length=1)
    """A weighted sum of objectives, instead of name and params."""
    scores: str | None = None
    """Name of scores that `emo score` stored with the data, for objectives such as psft and excess."""
    teacher: Teachers = None
    """Teacher of a divergence: {model: PATH}, {scores: NAME}, {ema: DECAY} for the average of the trained
    weights, or `base` for the model before training."""
    on_policy: OnPolicyConfig | None = None
    """Steps that train on text that the model generates. The teacher must be a model, not stored scores."""
    cost: str = "pretrained"
    """Embedding that defines the costs of wrong tokens: `pretrained` (the head of model.path before
    training), `live` (the head during training), or a model directory, hub id or tensor file. `constant`
    (every wrong token costs 1) and `permuted` (`pretrained` with tokens exchanged by cost_seed) are controls.
    `numbers` uses the difference between numeric tokens, logarithmic above 9."""
    cost_seed: int = 0
    """Seed of `permuted`."""
    cost_cache_mb: float = Field(0.0, ge=0)
    """Memory in which the costs of frequent targets are kept. This is faster, and changes gradients by less
    than 2e-3. It cannot be combined with cost: live."""
    z_loss: float = Field(0.0, ge=0)
    """Weight of a penalty on (log sum exp of the logits)^2, which keeps logits from drifting."""
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    """Share of the target's probability that is spread over the vocabulary."""

    @property
    def resolved_teacher(self) -> Teachers:
        """Return the teacher, which is set for the objective or for a part of its sum."""
        parts = (self, *(self.sum or ()))
        return next((part.teacher for part in parts if part.teacher is not None), None)

    @property
    def has_live_teacher(self) -> bool:
        """Return whether the teacher is a model that computes a forward pass for every batch."""
        teacher = self.resolved_teacher
        return teacher is not None and not (isinstance(teacher, TeacherConfig) and teacher.scores)

    @property
    def average_decay(self) -> float | None:
        """Return the decay of a teacher that averages the weights of the trained model, or None.

        A decay of 0 needs no average, because the teacher is the trained model.
        """
        teacher = self.resolved_teacher
        return teacher.ema or None if isinstance(teacher, TeacherConfig) else None

    @property
    def teaches_itself(self) -> bool:
        """Return whether the teacher is the model as it trains."""
        teacher = self.resolved_teacher
        return isinstance(teacher, TeacherConfig) and teacher.ema == 0

    @property
    def teacher_label(self) -> str | None:
        """Return the teacher's name for model cards, or None."""
        teacher = self.resolved_teacher
        if not isinstance(teacher, TeacherConfig):
            return teacher
        if teacher.ema is not None:
            return f"ema {teacher.ema:g}"
        return teacher.model or f"scores {teacher.scores}"

    @property
    def scores_name(self) -> str | None:
        """Return the name of the stored scores that training reads."""
        teacher = self.resolved_teacher
        stored = teacher.scores if isinstance(teacher, TeacherConfig) else None
        return stored or self.scores

    @property
    def label(self) -> str:
        """Return the objective's name for plans, model cards and reports."""
        return " + ".join(label_of(p.weight, p.name) for p in self.sum) if self.sum else self.name

    @model_validator(mode="after")
    def _is_consistent(self) -> ObjectiveConfig:
        _check_objective(self.name, self.params)
        if self.sum and (self.name, self.params) != ("emo", {}):
            raise ValueError("give name and params, or sum, not both")
        if self.sum and all(part.share != 1 for part in self.sum):
            problem = "shares choose the same steps for all parts, so that other steps would have no loss"
            raise ValueError(f"{problem}: give one part a share of 1")
        if self.cost == "live" and self.cost_cache_mb:
            raise ValueError("cost_cache_mb has no effect with cost: live, which changes in every step")
        teacher = self.resolved_teacher
        if any(part.teacher not in (None, teacher) for part in (self, *(self.sum or ()))):
            raise ValueError("the parts of a sum share one teacher: set objective.teacher")
        if isinstance(teacher, TeacherConfig) and teacher.scores and self.scores:
            raise ValueError("a run reads one set of scores: remove scores or teacher.scores")
        if self.on_policy is not None and not self.has_live_teacher:
            reason = "stored scores cover only the tokens of the data" if teacher else "there is no teacher"
            raise ValueError(f"on_policy needs teacher: {{model: PATH}}, {{ema: DECAY}} or base ({reason})")
        demonstrates = self.on_policy is not None and self.on_policy.context == "demonstration"
        if demonstrates and isinstance(teacher, TeacherConfig) and teacher.ema is None:
            raise ValueError("on_policy.context: demonstration needs teacher: {ema: DECAY} or base")
        return self
