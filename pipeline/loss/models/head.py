"""The fused loss inside a model: an output head that takes labels, and a causal LM's forward that ends in it.

`fuse_head` turns a Linear into a FusedHead. `fuse_model` does that to a Hugging Face causal LM and gives it
the forward of `FusedCausalLM`, or of a subclass, in which documents that share a row do not see each other. A
document begins at the start of a row and wherever a position is not the previous one plus one. Padding after
the last document of a row counts as a document. `probe.py` compares the result with the model itself.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from emo.common.causal_lm import IGNORE, read_logit_scaling
from emo.common.errors import UserError

from ..cost import CostEmbedding, Labels, LiveCost, label_count
from ..from_base import kl_from_base, most_likely
from ..fused import LossSums, Spec, apply_fused, make_spec
from ..objectives import Objective
from ..teacher import Teacher, TeacherBatch, TeacherModel, TopK

MicroBatch = dict[str, Any]  # keyword arguments of the model
# Keys of a model's inputs for a TopK.
TEACHER_IDS = "teacher_ids"
TEACHER_LOG_P = "teacher_log_p"
# A live teacher may read other rows. Their keys have this prefix, and another key holds the positions
# of the student's tokens in these rows, int64 [b, L].
DEMONSTRATION = "demonstration_"
TEACHER_POSITIONS = "teacher_positions"
# Keys of a model's inputs for the divergence from the model before training, live or of a TopK with a row for
# every supervised token, and for its k most likely tokens.
FROM_BASE = "from_base"
BASE_IDS = "base_ids"
BASE_LOG_P = "base_log_p"
TOP_K = "top_k"
VARLEN = "varlen"  # the attention of varlen.py
WEIGHTS = "loss_weights"  # key of a model's inputs for the weight of each label, float32 [b, L]
DOMAIN = "domain"  # key of a micro-batch for the domain of each row, int64 [b]
# Keys of transformers for the results of `segments`.
BOUNDS = "cu_seq_lens_q"
LONGEST = "max_length_q"
SHARED = "shared_rows"  # True: the inputs are this rank's part of rows that a group of ranks shares
SEGMENTS = (BOUNDS, "cu_seq_lens_k", LONGEST, "max_length_k")


def uses_segments(attention: str) -> bool:
    """Return whether an attention separates documents by their bounds, without a mask."""
    return attention == VARLEN or "flash" in attention


def segments(positions: Tensor) -> tuple[Tensor, int]:
    """Return the bounds of the documents in rows of `positions` [b, L], and the length of the longest.

    The bounds are int32 [documents + 1]: cumulative lengths over all rows, from 0 to b L. On a GPU this waits
    for the device, so the loader calls it on the host.
    """
    starts = (
        torch.nn.functional.pad(_document_starts(positions), (1, 0), value=True).flatten().nonzero()[:, 0]
    )
    bounds = torch.cat((starts, starts.new_tensor([positions.numel()]))).to(torch.int32)
    return bounds, int(bounds.diff().max())


def sum_by_document(values: Tensor, bounds: Tensor) -> Tensor:
    """Sum `values` [N] over the documents with these `bounds` (of `segments`), float64."""
    return torch.segment_reduce(values.double(), "sum", lengths=bounds.diff())


def separate_documents(model: Any, positions: Tensor, inputs: MicroBatch) -> None:
    """Complete the `inputs` of a fused `model` so that no document of its rows sees another.

    The inputs include positions [b, L]. They may include the `segments` as cu_seq_lens_q and max_length_q.
    Otherwise these are computed here, once for all layers. Raises UserError for documents that
    `model.packing` cannot separate, and for a mask that contradicts the positions.
    """
    bounds, _, longest, _ = (inputs.pop(name, None) for name in SEGMENTS)
    mask = inputs.get("attention_mask")
    if mask is not None:
        starts = _document_starts(positions)
        if mask.dim() != 2 or not bool(starts.any()):
            return
        # no token sees padding after its document; padding before one must be separated by its position
        if bool((mask[:, 1:].bool() & ~mask[:, :-1].bool() & ~starts).any()):
            problem = "a document follows padding in attention_mask, but its position_ids do not restart"
            raise UserError(f"{problem}; restart them, or pad on the right", code="mask-positions")
        del inputs["attention_mask"]  # with a mask, transformers would ignore the positions
    attention = model.config._attn_implementation
    if model.packing == "refused" and bool(_document_starts(positions).any()):
        raise UserError(packing_problem(model), code="packing")
    if model.packing == "mask":
        kind = model.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else model.dtype
        inputs["attention_mask"] = document_mask(positions, dtype)
    elif model.packing == "positions" and uses_segments(attention):
        if bounds is None or longest is None:
            bounds, longest = segments(positions)
        inputs.update(zip(SEGMENTS, (bounds, bounds, longest, longest), strict=True))
        if attention == VARLEN:
            # transformers uses a four-dimensional mask as it is, and does not build one of [b, 1, L, L]
            inputs["attention_mask"] = positions.new_empty((1, 1, 0, 0), dtype=torch.bool)


def packing_problem(model: Any) -> str:
    """Return why packed rows cannot train `model`, in one line."""
    attention = model.config._attn_implementation
    cure = "prepare the data with data.packing=none, or use another family (LLaMA, OPT, Mistral, Qwen, Gemma)"
    if uses_segments(attention):
        cure = "set attn_implementation=sdpa or eager"
    problem = (
        f"{type(model).__name__} with attn_implementation={attention} does not separate packed documents"
    )
    return f"{problem}; {cure}"


def document_mask(positions: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an additive attention mask [b, 1, L, L], 0 up to the token itself within its document."""
    document = torch.nn.functional.pad(_document_starts(positions), (1, 0)).cumsum(dim=1)
    same = document[:, None, :, None] == document[:, None, None, :]
    mask = torch.full(same.shape, torch.finfo(dtype).min, dtype=dtype, device=same.device)
    return mask.masked_fill_(same.tril(), 0.0)


def _document_starts(positions: Tensor) -> Tensor:
    """Return which of tokens 1 to L - 1 start a document, bool [b, L - 1]."""
    return positions.diff(dim=1) != 1


# arguments of a forward that returns logits
LOGITS_ONLY = ("num_items_in_batch", "logits_to_keep", "return_dict", "skip_logits")


class FusedHead(nn.Linear):
    """An output head that computes the loss if it gets labels.

    The weight is used inside the module's forward, so ZeRO-3 and FSDP gather it as for any other module.
    """

    spec: Spec

    def forward(  # type: ignore[override]
        self,
        hidden: Tensor,
        labels: Labels | None = None,
        teacher: TeacherBatch | None = None,
        stored: Tensor | None = None,
        as_teacher: bool = False,
        base: TeacherBatch | None = None,
        weights: Tensor | None = None,
    ) -> Tensor | LossSums | Teacher:
        """Return the logits [..., V] of hidden states, or their LossSums against labels.

        Args:
            hidden: [..., H].
            labels: [...], or their plan.
            teacher: For divergences. A Teacher without a weight uses this head.
            stored: [...], a log-probability of every label.
            as_teacher: Return `hidden` and the gathered head as a Teacher instead.
            base: The model before training. The losses by token then include the divergence from it.
            weights: [...], the weight of every label. None: 1.
        """
        if as_teacher:
            return self._as_teacher(hidden)
        if labels is None:
            return super().forward(hidden)
        teacher, base = map(self._with_head, (teacher, base))
        sums = apply_fused(hidden, self.weight, self.bias, labels, self.spec, teacher, stored, weights)
        if base is None:
            return sums
        kl = kl_from_base(self._as_teacher(hidden), base, labels, self.spec)
        kl = kl if weights is None else kl * weights.reshape(-1).to(kl.dtype)
        return sums._replace(by_token=torch.cat((sums.by_token, kl[None])))

    def _with_head(self, side: TeacherBatch | None) -> TeacherBatch | None:
        """Return a teacher's side of a batch, with this head if it has none."""
        if isinstance(side, Teacher) and side.weight is None:
            return self._as_teacher(side.hidden)._replace(temperature=side.temperature)
        return side

    def _as_teacher(self, hidden: Tensor) -> Teacher:
        """Return hidden states and this head, whose weights stay alive with the result."""
        weight = self.weight.detach()
        bias = None if self.bias is None else self.bias.detach()
        return Teacher(hidden, weight, bias, self.spec.terms.softcap, self.spec.logit_scale)

    def use(self, objective: Objective) -> None:
        """Replace the objective, for example by a schedule's next step, and keep options and costs."""
        self.spec = replace(self.spec, terms=replace(self.spec.terms, objective=objective))


def fuse_head(
    head: nn.Linear, objective: Objective, cost: CostEmbedding | LiveCost | None = None, **options: Any
) -> None:
    """Turn `head` into a FusedHead in place. Its parameters and their names do not change.

    Calling it again changes the objective. Raises UserError for a module whose forward is not that of a
    Linear.

    Args:
        head: The output head.
        objective: From `get_objective` or `weighted_sum`.
        cost: Transport costs, for objectives that need them.
        options: As in `fused_linear_loss`.
    """
    original = type(head)
    if not isinstance(head, FusedHead):
        if not isinstance(head, nn.Linear) or original.forward is not nn.Linear.forward:
            raise UserError(f"fuse_head needs a torch.nn.Linear (got: {original.__name__})", code="head-type")
        # a subclass, such as FSDP's, keeps its behaviour
        head.__class__ = FusedHead if original is nn.Linear else type("FusedHead", (FusedHead, original), {})
    head.spec = make_spec(objective, cost, **options)  # type: ignore[assignment]


def head_options(config: Any) -> dict[str, float]:
    """Return `logit_scale` and, if there is one, `softcap` of a Hugging Face `config`.

    `probe.py` detects models that use these keys in another way.
    """
    scale, softcap = read_logit_scaling(config)
    return {"logit_scale": scale} | ({} if softcap is None else {"softcap": softcap})


def shift_left(labels: Tensor) -> Tensor:
    """Shift labels [..., T] aligned with the inputs, so that position i predicts token i + 1."""
    return torch.cat((labels[..., 1:], labels.new_full((*labels.shape[:-1], 1), IGNORE)), dim=-1)


class FusedCausalLM:
    """A mixin that `fuse_model` puts before a causal LM's class. With labels, it returns the loss."""

    # How documents that share a row are separated: by `positions` that restart, by a `mask`, or not at all
    # (`refused`). `probe.py` sets it. With `alone` every row contains a single document.
    packing = "positions"
    shifted_labels = "labels"  # the argument for labels that are already shifted
    original_class: type
    argument_names: tuple[str, ...]  # of the model's forward, in order
    body_arguments: frozenset[str] | None  # names that the body accepts; None: any
    body_takes_positions: bool
    teacher: TeacherModel | None = None  # a live teacher, for divergences
    base_teacher: TeacherModel | None = None  # the model before training, if it is in memory

    def forward(self, *args: Any, **kwargs: Any) -> LossSums | Any:
        """Return the LossSums against shifted `labels` [b, L], or without labels the ordinary result.

        With `top_k` return the k most likely tokens at every supervised position instead (`most_likely`).
        """
        inputs = self.bind_arguments(args, kwargs)
        labels = inputs.pop("labels", None)
        stored = inputs.pop("stored", None)
        weights = inputs.pop(WEIGHTS, None)
        if labels is None:
            if "position_ids" not in self.argument_names:
                inputs.pop("position_ids", None)
            return super().forward(**inputs)  # type: ignore[misc]
        if (k := inputs.pop(TOP_K, None)) is not None:
            inputs = {key: value for key, value in inputs.items() if key not in (TEACHER_IDS, TEACHER_LOG_P)}
            head: Any = self.get_output_embeddings()  # type: ignore[attr-defined]
            model = head(self.compute_hidden(label_count(labels), inputs), as_teacher=True)
            return most_likely(model, labels, k, head.spec)
        return self.fused_sums(labels, inputs, stored, weights)

    def bind_arguments(self, args: tuple[Any, ...], kwargs: MicroBatch) -> MicroBatch:
        """Return all arguments of a call by name."""
        return dict(zip(self.argument_names, args, strict=False)) | kwargs

    def fused_sums(
        self,
        labels: Labels,
        inputs: MicroBatch,
        stored: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> LossSums:
        """Return the LossSums over the valid, shifted `labels` [b, L]: position i predicts labels[i].

        Args:
            labels: [b, L], or their plan.
            inputs: The arguments of the model's ordinary forward. `position_ids` [b, L] that restart mark
                documents, which do not see each other; a padding mask is then ignored. The `segments` of the
                positions may be added as cu_seq_lens_q and max_length_q, which saves their computation.
            stored: [b, L], a log-probability of every label.
            weights: [b, L], the weight of every label. None: 1.
        """
        ids = inputs.pop(TEACHER_IDS, None)
        log_p = inputs.pop(TEACHER_LOG_P, None)
        positions = inputs.pop(TEACHER_POSITIONS, None)
        seen = {key: inputs.pop(key) for key in list(inputs) if key.startswith(DEMONSTRATION)}
        base_ids = inputs.pop(BASE_IDS, None)
        base_log_p = inputs.pop(BASE_LOG_P, None)
        from_base = inputs.pop(FROM_BASE, False)
        hidden = self.compute_hidden(label_count(labels), inputs)
        head: Any = self.get_output_embeddings()  # type: ignore[attr-defined]
        teacher: TeacherBatch | None = None
        if head.spec.terms.objective.divergences and self.teacher is not None:
            if positions is None:
                teacher = self.teacher.run_batch(label_count(labels), inputs)
            else:
                seen = {key.removeprefix(DEMONSTRATION): value for key, value in seen.items()}
                teacher = self.teacher.run_batch(seen["input_ids"].numel(), seen)
                teacher = teacher._replace(hidden=teacher.hidden.flatten(0, -2)[positions])
        elif head.spec.terms.objective.divergences and ids is not None:
            teacher = TopK(ids, log_p)
        base: TeacherBatch | None = None if base_ids is None else TopK(base_ids, base_log_p)
        if from_base and self.base_teacher is not None:
            same = self.base_teacher is self.teacher and teacher is not None
            base = teacher if same else self.base_teacher.run_batch(label_count(labels), inputs)
        return head(hidden, labels, teacher, stored, base=base, weights=weights)

    def compute_hidden(self, tokens: int, inputs: MicroBatch) -> Tensor:
        """Return the hidden states [..., L, H] before the head, for inputs of `tokens` tokens."""
        model: Any = self
        unused = LOGITS_ONLY if uses_segments(model.config._attn_implementation) else LOGITS_ONLY + SEGMENTS
        inputs = {k: v for k, v in inputs.items() if k not in unused and v is not None}
        positions = inputs.get("position_ids")
        if isinstance(positions, Tensor) and positions.dim() == 2 and positions.numel() == tokens:
            separate_documents(self, positions, inputs)
        if not self.body_takes_positions:
            inputs.pop("position_ids", None)
        if self.body_arguments is not None:
            inputs = {k: v for k, v in inputs.items() if k in self.body_arguments}
        hidden = body_of(model)(**{"use_cache": False, **inputs})[0]
        head = model.get_output_embeddings()
        if not torch.is_autocast_enabled(hidden.device.type):
            hidden = hidden.to(head.weight.dtype)  # some families keep their residuals in float32
        return hidden


def body_of(model: Any) -> Any:
    """Return the part of a causal LM before its head, or the model itself if it is not separate.

    Llama 4 and mllama name their body `model`, but transformers looks for another name.
    """
    return getattr(model, "model", model) if model.base_model is model else model.base_model


def require_plain_head(model: Any) -> None:
    """Raise UserError if PEFT adapts, copies or wraps the model's output head."""
    wrapper = type(model.get_output_embeddings())
    if wrapper.__module__.startswith("peft."):
        raise UserError(
            f"PEFT wraps the output head of {type(model).__name__} ({wrapper.__name__}), but the fused loss "
            "needs its weight; remove the head and a tied embedding from model.lora.targets and set "
            "model.lora.train_embeddings=true to train them (in PEFT, remove them from target_modules, "
            "modules_to_save and trainable_token_indices, and unfreeze their weights)",
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
    """Make a Hugging Face causal LM end in the fused head if it gets labels, in place.

    Parameters, their names, saved files and the signature of its forward do not change. Calling it again
    changes the loss.

    Args:
        model: The causal LM.
        objective: From `get_objective` or `weighted_sum`.
        cost: Transport costs, for objectives that need them.
        forward: A subclass of FusedCausalLM with other arguments or results.
        options: As in `fused_linear_loss`; logit scale and soft cap default to those of the configuration.

    Raises:
        UserError: the model has no Linear head separate from its body, or its forward was replaced.
    """
    _restore_forward(model)
    # replace a class made here before; extend a class that a wrapper (FSDP) made from it
    original: Any = vars(type(model)).get("original_class", type(model))
    head = model.get_output_embeddings()
    require_plain_head(model)
    body = body_of(model)
    if not isinstance(head, nn.Linear) or body is model:
        raise UserError(f"{original.__name__} has no separate linear output head", code="needs-head")
    if getattr(model.config.get_text_config(), "output_router_logits", False):
        warnings.warn("config.output_router_logits: the fused loss has no auxiliary loss", stacklevel=2)
    fuse_head(head, objective, cost, **head_options(model.config) | options)
    accepted = inspect.signature(body.forward).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
    attributes = {
        "__module__": original.__module__,
        "__doc__": original.__doc__,
        "forward": _with_signature(forward, original),
        "original_class": original,
        "argument_names": tuple(inspect.signature(original.forward).parameters)[1:],
        "body_arguments": None if takes_any else frozenset(accepted),
        "body_takes_positions": "position_ids" in accepted,
    }
    # the same name: transformers writes it into saved configurations
    model.__class__ = type(original.__name__, (forward, original), attributes)


def _with_signature(forward: type[FusedCausalLM], original: Any) -> Any:
    """Return the forward with the original's signature, from which Trainer chooses a data set's columns."""

    @functools.wraps(original.forward)
    def with_signature(self: Any, *args: Any, **kwargs: Any) -> Any:
        return forward.forward(self, *args, **kwargs)

    # position_ids separate documents even if the model does not take them
    signature = inspect.signature(original.forward)
    extended = list(signature.parameters.values())
    if "position_ids" not in signature.parameters:
        extra = inspect.Parameter("position_ids", inspect.Parameter.KEYWORD_ONLY, default=None)
        keywords = extended and extended[-1].kind is inspect.Parameter.VAR_KEYWORD
        extended.insert(len(extended) - 1 if keywords else len(extended), extra)
    with_signature.__signature__ = signature.replace(parameters=extended)  # type: ignore[attr-defined]
    return with_signature


def _restore_forward(model: nn.Module) -> None:
    """Remove a forward that Accelerate or TRL set on this instance, which would hide the class's method."""
    forward = vars(model).get("forward")
    if forward is None:
        return

    def is_from_trl(function: Any) -> bool:
        return getattr(function, "__globals__", {}).get("__name__", "").startswith("trl.")

    innermost = inspect.unwrap(getattr(forward, "__func__", forward), stop=is_from_trl)
    is_wrapper = innermost is inspect.unwrap(type(model).forward) and not hasattr(model, "_hf_hook")
    if not (is_wrapper or is_from_trl(innermost)):
        problem = f"the forward of this {type(model).__name__} was replaced; load it without device_map"
        raise UserError(problem, code="forward-replaced")
    for name in ("forward", "_original_forward"):
        vars(model).pop(name, None)
