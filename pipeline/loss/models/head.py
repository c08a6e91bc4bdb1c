"""The fused loss inside a model: an output head that takes labels, and a causal LM's forward that ends in it.

`fuse_head` turns a Linear into a FusedHead; `fuse_model` does that to a Hugging Face causal LM and gives it
`FusedCausalLM`'s forward, or a caller's variant of it, in which documents that share a row do not see each
other. A document begins with a row, and wherever a position does not follow the one before it by one; padding
after the last document of a row counts as another one. `probe.py` checks the result against the model itself.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from emo.common.errors import UserError
from emo.common.io.logits import head_options
from emo.common.labels import IGNORE

from ..cost import CostEmbedding, Labels, LiveCost, label_count
from ..fused import LossSums, Spec, apply_fused, make_spec
from ..objectives import Objective
from ..teacher import Beside, Side, Teacher, TopK

TEACHER_IDS, TEACHER_LOG_P = "teacher_ids", "teacher_log_p"  # among a model's inputs: those of a TopK
VARLEN = "varlen"  # the attention of varlen.py
DOMAIN = "domain"  # key of a micro-batch: the domain of each row, int64 [b]
BOUNDS, LONGEST = "cu_seq_lens_q", "max_length_q"  # transformers' names for the results of `segments`
SEGMENTS = (BOUNDS, "cu_seq_lens_k", LONGEST, "max_length_k")


def by_segments(attention: str) -> bool:
    """Return whether an attention takes the documents' bounds, and needs no mask to separate them."""
    return attention == VARLEN or "flash" in attention


def segments(positions: Tensor) -> tuple[Tensor, int]:
    """Return the bounds of the documents in rows of `positions` [b, L], and the length of the longest.

    The bounds are int32 [documents + 1], cumulative lengths over all rows one after the other, from 0 to b *
    L. On a GPU this waits for the device; the loader calls it on the host.
    """
    begins = torch.nn.functional.pad(_starts(positions), (1, 0), value=True).flatten().nonzero()[:, 0]
    bounds = torch.cat((begins, begins.new_tensor([positions.numel()]))).to(torch.int32)
    return bounds, int(bounds.diff().max())


def by_document(values: Tensor, bounds: Tensor) -> Tensor:
    """Return the sums of `values` [N] over the documents with these `bounds` (of `segments`), float64."""
    return torch.segment_reduce(values.double(), "sum", lengths=bounds.diff())


def keep_apart(model: Any, positions: Tensor, inputs: dict[str, Any]) -> None:
    """Complete the `inputs` of a fused `model` so that no document of its rows sees another.

    positions [b, L] are among the inputs. So may be their `segments`, as cu_seq_lens_q and max_length_q;
    otherwise these are computed here, once for all layers. Raises UserError for documents that
    `model.packing` cannot keep apart, and for a mask that contradicts the positions.
    """
    bounds, _, longest, _ = (inputs.pop(name, None) for name in SEGMENTS)
    mask = inputs.get("attention_mask")
    if mask is not None:
        starts = _starts(positions)
        if mask.dim() != 2 or not bool(starts.any()):
            return
        # padding after a document is never seen; padding before one must be separated by its position
        if bool((mask[:, 1:].bool() & ~mask[:, :-1].bool() & ~starts).any()):
            problem = "a document follows padding in attention_mask although its position_ids continue"
            raise UserError(f"{problem}; pad on the right, or restart them there", code="mask-positions")
        del inputs["attention_mask"]  # with it, transformers would not look at the positions
    attention = model.config._attn_implementation
    if model.packing == "refused" and bool(_starts(positions).any()):
        raise UserError(refusal(model), code="packing")
    if model.packing == "mask":
        kind = model.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else model.dtype
        inputs["attention_mask"] = document_mask(positions, dtype)
    elif model.packing == "positions" and by_segments(attention):
        if bounds is None or longest is None:
            bounds, longest = segments(positions)
        inputs.update(zip(SEGMENTS, (bounds, bounds, longest, longest), strict=True))
        if attention == VARLEN:
            # transformers takes a mask of four dimensions as it is, and then makes none of [b, 1, L, L]
            inputs["attention_mask"] = positions.new_empty((1, 1, 0, 0), dtype=torch.bool)


def refusal(model: Any) -> str:
    """Return the reason why packed rows cannot train `model`, in one line."""
    attention = model.config._attn_implementation
    cure = "train on rows of one document each, or choose another family (LLaMA, OPT, Mistral, Qwen, Gemma)"
    if by_segments(attention):
        cure = "set attn_implementation=sdpa or eager"
    problem = f"{type(model).__name__} lets documents that share a row see each other"
    return f"{problem}, with attn_implementation={attention}; {cure}"


def document_mask(positions: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask to add to attention scores, [b, 1, L, L]: 0 within a document, backwards."""
    document = torch.nn.functional.pad(_starts(positions), (1, 0)).cumsum(dim=1)
    same = document[:, None, :, None] == document[:, None, None, :]
    mask = torch.full(same.shape, torch.finfo(dtype).min, dtype=dtype, device=same.device)
    return mask.masked_fill_(same.tril(), 0.0)


def _starts(positions: Tensor) -> Tensor:
    """Return True for those of tokens 1 to L - 1 that start a document, [b, L - 1]."""
    return positions.diff(dim=1) != 1


# Arguments for a forward that makes logits.
LOGITS_ONLY = ("num_items_in_batch", "logits_to_keep", "return_dict", "skip_logits")


class FusedHead(nn.Linear):
    """An output head that computes the loss itself when it is given labels.

    The weight is used inside the module's own forward: what gathers parameters around modules (ZeRO-3, FSDP)
    treats it like any other.
    """

    spec: Spec

    def forward(  # type: ignore[override]
        self,
        hidden: Tensor,
        labels: Labels | None = None,
        teacher: Side | None = None,
        stored: Tensor | None = None,
        at_head: bool = False,
    ) -> Tensor | LossSums | Teacher:
        """Return the logits [..., V] of `hidden` [..., H], or the LossSums against `labels` [...].

        at_head: return `hidden` with the head, gathered as it is here, instead; for a teacher.
        """
        if at_head:
            return self._above(hidden)
        if labels is None:
            return super().forward(hidden)
        if isinstance(teacher, Teacher) and teacher.weight is None:
            teacher = self._above(teacher.hidden)
        return apply_fused(hidden, self.weight, self.bias, labels, self.spec, teacher, stored)

    def _above(self, hidden: Tensor) -> Teacher:
        """Return hidden states under this head, whose weights stay alive with the result."""
        weight, bias = self.weight.detach(), None if self.bias is None else self.bias.detach()
        return Teacher(hidden, weight, bias, self.spec.terms.softcap, self.spec.logit_scale)

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
            raise UserError(f"fuse_head needs a torch.nn.Linear, no {ordinary.__name__}", code="head-type")
        # a subclass, such as FSDP's, keeps its own behaviour
        head.__class__ = FusedHead if ordinary is nn.Linear else type("FusedHead", (FusedHead, ordinary), {})
    head.spec = make_spec(objective, cost, **options)  # type: ignore[assignment]


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
    teacher: Beside | None = None  # whom divergences compare with, where it is live

    def forward(self, *args: Any, **kwargs: Any) -> LossSums | Any:
        """Return the LossSums against `labels` [b, L], already shifted; else the ordinary result."""
        inputs = self.named(args, kwargs)
        labels, stored = inputs.pop("labels", None), inputs.pop("stored", None)
        if labels is None:
            if "position_ids" not in self.order:
                inputs.pop("position_ids", None)
            return super().forward(**inputs)  # type: ignore[misc]
        return self.fused_sums(labels, inputs, stored)

    def named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return all arguments of a call of the model by name."""
        return dict(zip(self.order, args, strict=False)) | kwargs

    def fused_sums(self, labels: Labels, inputs: dict[str, Any], stored: Tensor | None = None) -> LossSums:
        """Return the LossSums over the valid `labels` [b, L], already shifted: labels[i] is predicted at i.

        inputs: the arguments of the model's ordinary forward. `position_ids` [b, L] that restart mark
        documents, which do not see each other; a padding mask beside them is not needed and not used. The
        `segments` of the positions may be given as cu_seq_lens_q and max_length_q: no layer then looks again.
        """
        columns = inputs.pop(TEACHER_IDS, None), inputs.pop(TEACHER_LOG_P, None)
        hidden = self.before_head(label_count(labels), inputs)
        head: Any = self.get_output_embeddings()  # type: ignore[attr-defined]
        if not head.spec.terms.objective.against:
            return head(hidden, labels, stored=stored)
        if self.teacher is None:
            return head(hidden, labels, None if columns[0] is None else TopK(*columns), stored)
        return head(hidden, labels, self.teacher.side(label_count(labels), inputs), stored)

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


def require_plain_head(model: Any) -> None:
    """Raise UserError where PEFT adapts, copies or wraps a model's output head."""
    wrapper = type(model.get_output_embeddings())
    if wrapper.__module__.startswith("peft."):
        raise UserError(
            f"PEFT wraps the output head of {type(model).__name__} ({wrapper.__name__}), and the fused loss "
            "reads its weight; leave the head out of model.lora.targets (in PEFT: target_modules, "
            "modules_to_save, trainable_token_indices), and a tied embedding with it",
            code="adapted-head",
        )


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
    loss. `forward`: a subclass of FusedCausalLM that takes labels or returns results in another form.
    `options`: as in `fused_linear_loss`; logit scale and soft cap default to those of the configuration.
    Raises UserError for a model without a Linear head apart from its body, or whose forward was replaced.
    """
    _uncover_forward(model)
    # a class made here before is replaced; one made from it by a wrapper (FSDP) is built upon
    ordinary: Any = vars(type(model)).get("ordinary", type(model))
    head = model.get_output_embeddings()
    require_plain_head(model)
    if not isinstance(head, nn.Linear) or model.base_model is model:
        raise UserError(f"{ordinary.__name__} has no linear output head of its own", code="needs-head")
    if getattr(model.config.get_text_config(), "output_router_logits", False):
        warnings.warn("config.output_router_logits: the fused loss has no auxiliary loss", stacklevel=2)
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
    """Remove the forward that Accelerate or TRL gave to this instance, which would hide the class's."""
    forward = vars(model).get("forward")
    if forward is None:
        return

    def of_trl(function: Any) -> bool:
        return getattr(function, "__globals__", {}).get("__name__", "").startswith("trl.")

    innermost = inspect.unwrap(getattr(forward, "__func__", forward), stop=of_trl)
    wraps = innermost is inspect.unwrap(type(model).forward) and not hasattr(model, "_hf_hook")
    if not (wraps or of_trl(innermost)):
        problem = f"the forward of this {type(model).__name__} was replaced; load it without device_map"
        raise UserError(problem, code="forward-replaced")
    for name in ("forward", "_original_forward"):
        vars(model).pop(name, None)
