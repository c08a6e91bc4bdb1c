"""The fused loss inside a model: an output head that takes labels, and a causal LM's forward that ends in it.

`fuse_head` turns a Linear into a FusedHead; `fuse_model` does that to a Hugging Face causal LM and gives it
`FusedCausalLM`'s forward, or a caller's variant of it. `probe.py` checks the result against the model itself.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from common.errors import UserError
from common.labels import IGNORE
from pipeline.loss.cost import CostEmbedding, LiveCost
from pipeline.loss.dense import Teacher
from pipeline.loss.documents import SEGMENTS, by_segments, keep_apart
from pipeline.loss.fused import apply_fused
from pipeline.loss.registry import Objective
from pipeline.loss.spec import Spec, make_spec
from pipeline.loss.sums import LossSums
from pipeline.loss.token_plan import Labels, label_count

# Keys of configurations for a scale or cap of the logits. `probe.py` finds models that use them otherwise.
DIVISORS = ("logits_scaling",)
FACTORS = ("logit_scale", "lm_head_multiplier")
CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
MULTIPLIES_BY_DIVISOR = ("hyperclovax",)  # model types that mean a factor where the others mean a divisor

LOGITS_ONLY = (
    "num_items_in_batch",
    "logits_to_keep",
    "return_dict",
    "skip_logits",
)  # for a forward that makes logits


class FusedHead(nn.Linear):
    """An output head that computes the loss itself when it is given labels.

    Made from an existing Linear by `fuse_head`. The weight is used inside the module's own forward, so
    everything that gathers parameters around modules (ZeRO-3, FSDP) treats it like any other.
    """

    spec: Spec

    def forward(  # type: ignore[override]
        self,
        hidden: Tensor,
        labels: Labels | None = None,
        teacher: Teacher | None = None,
        stored: Tensor | None = None,
    ) -> Tensor | LossSums:
        """Return the logits [..., V] of `hidden` [..., H], or the LossSums against `labels` [...].

        `teacher` and `stored` [...] as in `fused_linear_loss`, whose errors it raises.
        """
        if labels is None:
            return super().forward(hidden)
        return apply_fused(hidden, self.weight, self.bias, labels, self.spec, teacher, stored)

    def use(self, objective: Objective) -> None:
        """Minimise `objective` from now on, as in a schedule's next step, with the same options and costs."""
        self.spec = replace(self.spec, terms=replace(self.spec.terms, objective=objective))


def fuse_head(
    head: nn.Linear, objective: Objective, cost: CostEmbedding | LiveCost | None = None, **options: Any
) -> None:
    """Turn `head` into a FusedHead in place; parameters and their names stay.

    `options` as in `fused_linear_loss`. Calling it again changes the objective. Raises UserError for a module
    whose forward is not that of a Linear.
    """
    ordinary = type(head)
    if not isinstance(head, FusedHead):
        if not isinstance(head, nn.Linear) or ordinary.forward is not nn.Linear.forward:
            raise UserError(f"fuse_head needs a torch.nn.Linear (got {ordinary.__name__})", code="head-type")
        # a subclass, such as FSDP's, keeps its own behaviour
        head.__class__ = FusedHead if ordinary is nn.Linear else type("FusedHead", (FusedHead, ordinary), {})
    head.spec = make_spec(objective, cost, **options)  # type: ignore[assignment]


def head_options(config: Any) -> dict[str, float]:
    """Return those of `logit_scale` and `softcap` that a Hugging Face `config` gives its model."""
    text = config.get_text_config()
    options: dict[str, float] = {}
    for name in (*DIVISORS, *FACTORS, *CAPS):
        value = getattr(text, name, None)
        if not isinstance(value, (int, float)) or not value:
            continue
        if name in CAPS:
            options["softcap"] = float(value)
        elif name in DIVISORS and text.model_type not in MULTIPLIES_BY_DIVISOR:
            options["logit_scale"] = 1.0 / value
        else:
            options["logit_scale"] = float(value)
    return options


def shift_left(labels: Tensor) -> Tensor:
    """Return labels [..., T] of predictions from labels of inputs: position i predicts token i + 1."""
    return torch.cat((labels[..., 1:], labels.new_full((*labels.shape[:-1], 1), IGNORE)), dim=-1)


class FusedCausalLM:
    """Mixed in before a causal LM's class by `fuse_model`: with labels, its forward ends in the loss."""

    # How documents that share a row stay separate: the model does it by `positions` that restart, or needs a
    # `mask`; `refused`: it can do neither. Set by `probe.py`. `alone`: every row holds a single document.
    packing = "positions"
    shifted_labels = "labels"  # the argument that takes labels already shifted
    order: tuple[str, ...]  # names of the model's positional arguments
    takes: frozenset[str] | None  # names that the body accepts; None: any
    takes_positions: bool

    def forward(self, *args: Any, **kwargs: Any) -> LossSums | Any:
        """Return the LossSums against `labels` [b, L], already shifted; without labels the ordinary result.

        Labels may be planned already (`token_plan.py`). `stored` [b, L]: a log-probability of each label, for
        objectives that read one.
        """
        inputs = self.named(args, kwargs)
        labels, stored = inputs.pop("labels", None), inputs.pop("stored", None)
        if labels is None:
            if "position_ids" not in self.order:
                inputs.pop("position_ids", None)
            return super().forward(**inputs)  # type: ignore[misc]
        return self.fused_sums(labels, inputs, stored)

    def named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """All arguments of a call of the model by name."""
        return dict(zip(self.order, args, strict=False)) | kwargs

    def fused_sums(self, labels: Labels, inputs: dict[str, Any], stored: Tensor | None = None) -> LossSums:
        """Sums of losses over the valid `labels` [b, L], already shifted: labels[i] is predicted at i.

        inputs: the arguments of the model's ordinary forward. `position_ids` [b, L] that restart mark
        documents, which do not see each other; a padding mask beside them is not needed and not used. The
        `segments` of the positions may be given as cu_seq_lens_q and max_length_q: no layer then looks again.
        """
        hidden = self.before_head(label_count(labels), inputs)
        return self.get_output_embeddings()(hidden, labels, stored=stored)  # type: ignore[attr-defined]

    def before_head(self, tokens: int, inputs: dict[str, Any]) -> Tensor:
        """Return the hidden states [..., L, H] that the head takes, for inputs of `tokens` tokens."""
        model: Any = self
        unused = LOGITS_ONLY if by_segments(model.config._attn_implementation) else LOGITS_ONLY + SEGMENTS
        inputs = {k: v for k, v in inputs.items() if k not in unused and v is not None}
        positions = inputs.get("position_ids")
        if isinstance(positions, Tensor) and positions.dim() == 2 and positions.numel() == tokens:
            keep_apart(self, positions, inputs)
        if not self.takes_positions:
            inputs.pop("position_ids", None)
        if self.takes is not None:
            inputs = {k: v for k, v in inputs.items() if k in self.takes}
        hidden = model.base_model(**{"use_cache": False, **inputs})[0]
        head = model.get_output_embeddings()
        if not torch.is_autocast_enabled(hidden.device.type):
            hidden = hidden.to(head.weight.dtype)  # some families keep their residuals in float32
        return hidden


def fuse_model(
    model: Any,
    objective: Objective,
    cost: CostEmbedding | LiveCost | None = None,
    *,
    forward: type[FusedCausalLM] = FusedCausalLM,
    **options: Any,
) -> None:
    """Make a Hugging Face causal LM end in the fused head when it is given labels; in place.

    Parameters, their names, saved files and the signature of its forward stay. Calling it again changes the
    loss.

    Args:
        model: a causal LM with a Linear output head and a body apart from it.
        objective: from `get_objective` or `weighted_sum`.
        cost: transport costs of the model's vocabulary, for objectives that read D.
        forward: a subclass of FusedCausalLM that takes labels or returns results in another form.
        options: as in `fused_linear_loss`; logit scale and soft cap default to those of the configuration.

    Raises:
        UserError: for a model without such a head or body, or whose forward was replaced.
    """
    _uncover_forward(model)
    # a class made here before is replaced; one made from it by a wrapper (FSDP) is built upon
    ordinary: Any = vars(type(model)).get("ordinary", type(model))
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise UserError(f"{ordinary.__name__} has no linear output head to fuse", code="needs-head")
    if model.base_model is model:
        raise UserError(
            f"{ordinary.__name__} has no body apart from its head: its loss cannot be fused",
            code="needs-body",
        )
    if getattr(model.config.get_text_config(), "output_router_logits", False):
        warnings.warn(
            "config.output_router_logits is set, but the fused loss does not include the router's "
            "auxiliary loss",
            stacklevel=2,
        )
    fuse_head(head, objective, cost, **head_options(model.config) | options)
    signature = inspect.signature(ordinary.forward)
    accepted = inspect.signature(model.base_model.forward).parameters
    anything = any(p.kind is p.VAR_KEYWORD for p in accepted.values())

    @functools.wraps(ordinary.forward)  # Trainer reads the signature to choose a data set's columns
    def with_signature(self: Any, *args: Any, **kwargs: Any) -> Any:
        return forward.forward(self, *args, **kwargs)

    # position_ids tell documents apart whether the model takes them or not
    extended = list(signature.parameters.values())
    if "position_ids" not in signature.parameters:
        extra = inspect.Parameter("position_ids", inspect.Parameter.KEYWORD_ONLY, default=None)
        keywords = extended and extended[-1].kind is inspect.Parameter.VAR_KEYWORD
        extended.insert(len(extended) - 1 if keywords else len(extended), extra)
    with_signature.__signature__ = signature.replace(parameters=extended)  # type: ignore[attr-defined]
    facts = {
        "__module__": ordinary.__module__,
        "__doc__": ordinary.__doc__,
        "forward": with_signature,
        "ordinary": ordinary,
        "order": tuple(signature.parameters)[1:],
        "takes": None if anything else frozenset(accepted),
        "takes_positions": "position_ids" in accepted,
    }
    # the same name: transformers writes it into saved configurations
    model.__class__ = type(ordinary.__name__, (forward, ordinary), facts)


def _uncover_forward(model: nn.Module) -> None:
    """Remove the forward that a Trainer gave to this instance: it would hide the fused one of the class.

    Accelerate's mixed precision wraps the class's forward, and the next Trainer does it again; TRL's computes
    another loss. Raises UserError for any other forward.
    """
    forward = vars(model).get("forward")
    if forward is None:
        return

    def of_trl(function: Any) -> bool:
        return getattr(function, "__globals__", {}).get("__name__", "").startswith("trl.")

    innermost = inspect.unwrap(getattr(forward, "__func__", forward), stop=of_trl)
    wraps = innermost is inspect.unwrap(type(model).forward) and not hasattr(model, "_hf_hook")
    if not (wraps or of_trl(innermost)):
        raise UserError(
            f"the forward of this {type(model).__name__} was replaced, and would hide the fused loss: load "
            "the model anew, without device_map over several devices",
            code="forward-replaced",
        )
    for name in ("forward", "_original_forward"):
        vars(model).pop(name, None)
