"""Start-up probe: compare a fused model with itself on a few tokens before training.

It checks two properties with the weights and the forward of training:

head     The fused loss equals the loss of the model's logits. Model families scale, cap, mask or shift logits
         in ways that no list of names covers. The labels are the least and the most likely tokens, where
         differences are largest.
packing  A document in a packed row gives the same result as alone: it does not change with the previous
         document, and its hidden states are those of a separate row. Rounding is estimated from the change of
         the first document with the second, since a causal model causes no other change there.

The probe runs a few forward passes without gradient on rows of at most 24 tokens. All ranks run the same
passes, so parameters may be partitioned.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from emo.common.context_length import context_length
from emo.common.errors import UserError, one_line

from ..objectives import get_objective
from .head import packing_problem, uses_segments

log = logging.getLogger(__name__)

LENGTH = 12  # tokens per document
HEAD_TOLERANCE = {False: 1e-3, True: 5e-3}  # relative to the logits' range; True: half precision
ALONE_TOLERANCE = {False: 1e-2, True: 1e-1}  # relative to the hidden states' norm
WINDOWS = ("sliding_window", "attention_window_size", "window_size", "attention_chunk_size")


class Probe:
    """A fused model, and the callable through which training reaches it."""

    def __init__(
        self, model: Any, forward: Callable[..., Any], collective: bool, device: torch.device | None
    ) -> None:
        self.model = model
        self.forward = forward
        self.collective = collective
        self.head = model.get_output_embeddings()
        self.device = device or self.head.weight.device
        text = model.config.get_text_config()
        self.name = model.original_class.__name__
        context = context_length(text) or 2 * LENGTH
        self.length = min(LENGTH, context // 2)
        generator = torch.Generator().manual_seed(0)
        count = 4 * self.length
        tokens = torch.randperm(text.vocab_size, generator=generator)
        self.documents = tokens.repeat(-(-count // len(tokens)))[:count].view(4, -1).to(self.device)
        self.windowed = any(isinstance(getattr(text, name, None), int) for name in WINDOWS)
        self.half = False

    def run(
        self, ids: Tensor, labels: Tensor | None = None, positions: Tensor | None = None
    ) -> tuple[Any, Tensor, Any]:
        """Return the model's output for `ids` [b, L], the hidden states [b, L, H], and the head's output."""
        calls: list[tuple[Tensor, Any]] = []
        hook = self.head.register_forward_hook(lambda _, args, out: calls.append((args[0], out)))
        inputs: dict[str, Tensor | bool | None] = {"input_ids": ids, "position_ids": positions}
        inputs[self.model.shifted_labels] = labels
        if labels is None and "use_cache" in self.model.argument_names:
            inputs["use_cache"] = False
        try:
            result = self.forward(**{k: v for k, v in inputs.items() if v is not None})
        finally:
            hook.remove()
        if not calls:
            problem = f"the forward of {self.name} does not call its output head"
            raise UserError(problem, code="head-unused")
        hidden, out = calls[-1]
        return result, hidden.reshape(*ids.shape, -1).float(), out

    def max_over_ranks(self, *numbers: float) -> list[float]:
        """Return the maximum of each number over all ranks, so that these agree. NaN counts as infinite."""
        values = torch.tensor(numbers, dtype=torch.float64).nan_to_num(nan=torch.inf).to(self.device)
        if self.collective and dist.is_initialized():
            values = values.float()
            dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return values.tolist()

    def check_head(self) -> None:
        """Raise UserError if the fused loss differs from the loss of the model's logits."""
        result, hidden, out = self.run(self.documents)
        logits = result["logits"] if isinstance(result, dict) else result[0]
        self.half = logits.dtype.itemsize == 2 or out.dtype.itemsize == 2
        z = logits.float()
        spread = (z.amax(-1) - z.amin(-1)).sum()
        errors = []
        for labels in (z.argmin(-1), z.argmax(-1)):
            want = (z.logsumexp(-1) - z.gather(-1, labels[..., None])[..., 0]).sum()
            got = self.run(self.documents, labels)[2].nll
            errors.append(float((got - want).abs() / spread))
        broken = float(not bool(torch.isfinite(hidden).all()))
        columns = float(logits.shape[-1] != self.head.out_features)
        broken, columns, *errors = self.max_over_ranks(broken, columns, *errors)
        if broken:
            problem = f"{self.name} computes NaN or infinite values; check its weights"
            raise UserError(problem, code="not-finite")
        if columns or max(errors) > HEAD_TOLERANCE[self.half]:
            problem = f"{self.name} transforms its logits in a way that the fused head does not support"
            cure = "train from logits with emo.hf.loss_function"
            raise UserError(f"{problem} (error: {max(errors):.2g}); {cure}", code="head-differs")

    def separates_documents(self) -> bool:
        """Return whether packed documents give the same result as alone, with the model's current `packing`.

        Raises UserError for a model that is not causal.
        """
        n = self.length
        (x, other_x, y, other_y) = self.documents
        rows = torch.stack([torch.cat(pair) for pair in ((x, y), (other_x, y), (x, other_y))])
        positions = torch.arange(n, device=self.device).repeat(2).expand(len(rows), -1)
        try:
            packed = self.run(rows, rows, positions)[1]
        except (TypeError, ValueError, RuntimeError, IndexError) as error:
            if isinstance(error, torch.cuda.OutOfMemoryError):
                raise
            if self.collective and dist.is_initialized():
                dist.barrier()  # raises if the error comes from a lost rank
            log.debug("%s with packing=%s: %s", self.name, self.model.packing, one_line(error))
            return False
        alone = self.run(self.documents, self.documents)[1][2]
        leak = float((packed[0, n:] - packed[1, n:]).abs().max())
        rounding = float((packed[0, :n] - packed[2, :n]).abs().max())
        distance = float((packed[0, n:] - alone).norm() / alone.norm())
        largest = float(packed.abs().max())
        tolerance = ALONE_TOLERANCE[self.half]
        leak, rounding, distance = self.max_over_ranks(leak, rounding, distance)
        if rounding > tolerance * largest:  # the first document changed with the second
            problem = f"{self.name} is not causal: its tokens attend to later tokens"
            raise UserError(problem, code="not-causal")
        return leak <= 4 * rounding + 1e-6 * largest and distance <= tolerance


def probe_model(
    model: Any,
    forward: Callable[..., Any] | None = None,
    *,
    packed: bool = True,
    collective: bool = False,
    device: torch.device | None = None,
) -> str:
    """Check a fused model, and set and return its `packing`: `positions`, `mask` or `refused`.

    Args:
        model: The fused model.
        forward: The callable of training (an engine, a wrapped model), by default the model.
        packed: Rows contain several documents, so `refused` is an error.
        collective: All ranks call together and agree.
        device: Where the rows go, by default the head's device.

    Raises:
        UserError: the fused head does not reproduce the model's logits, values are not finite, the model is
            not causal, or packed documents see each other.
    """
    run = model if forward is None else forward
    root = run if isinstance(run, nn.Module) else model
    with torch.no_grad(), evaluating_cross_entropy(root, model), torch.compiler.set_stance("force_eager"):
        probe = Probe(model, run, collective, device)
        probe.check_head()
        model.packing = "positions"
        separate = probe.separates_documents()
        has_bounds = uses_segments(model.config._attn_implementation)
        if not separate and not probe.windowed and not has_bounds:
            model.packing = "mask"
            separate = probe.separates_documents()
    if not separate:
        model.packing = "refused"
        if packed:
            raise UserError(packing_problem(model), code="packing")
    if model.packing == "mask":
        log.info("%s ignores restarting positions; a mask separates documents in a row", probe.name)
    return model.packing


@contextlib.contextmanager
def evaluating_cross_entropy(root: nn.Module, model: Any) -> Iterator[None]:
    """Turn dropout off and let the head compute plain cross-entropy within the block."""
    modes = [(module, module.training) for module in root.modules()]
    head = model.get_output_embeddings()
    spec = head.spec
    terms = replace(spec.terms, objective=get_objective("mle"), z_loss=0.0, label_smoothing=0.0)
    for module, _ in modes:
        module.training = False
    head.spec = replace(spec, terms=terms, cost=None)
    try:
        yield
    finally:
        head.spec = spec
        for module, mode in modes:
            module.training = mode
