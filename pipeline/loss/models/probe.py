"""Start-up probe: a fused model against itself, on a few tokens, before hours are spent on it.

Two claims are checked on the very path that training takes, with the very weights:

head     The fused loss is that of the model's logits. Families scale, cap, mask or shift them in ways
         that no list of names covers. Labels are the least and the most likely tokens: there an error shows.
packing  A document in a packed row is computed as if it were alone: nothing changes when the document
         before it does, and its hidden states are those of a row without others. Rounding is told from a
         leak by the change of the first document with the second: in a causal model, rounding alone.

All of it is a handful of forward passes without gradient on rows of at most 24 tokens. Every rank does the
same, so parameters may be partitioned.
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

from emo.common.errors import UserError, one_line
from emo.common.io.weights import context_length

from ..objectives import get_objective
from .head import by_segments, refusal

log = logging.getLogger(__name__)

LENGTH = 12  # tokens of a document
HEAD_TOLERANCE = {False: 1e-3, True: 5e-3}  # share of the logits' range; True: half precision
ALONE_TOLERANCE = {False: 1e-2, True: 1e-1}  # share of the hidden states' norm
WINDOWS = ("sliding_window", "attention_window_size", "window_size", "attention_chunk_size")


class Probe:
    """A fused model, and the callable through which training reaches it."""

    def __init__(
        self, model: Any, forward: Callable[..., Any], collective: bool, device: torch.device | None
    ) -> None:
        self.model, self.forward, self.collective = model, forward, collective
        self.head = model.get_output_embeddings()
        self.device = device or self.head.weight.device
        text = model.config.get_text_config()
        self.name = model.ordinary.__name__
        context = context_length(text) or 2 * LENGTH
        self.length = min(LENGTH, context // 2)
        generator = torch.Generator().manual_seed(0)
        count = 4 * self.length
        draw = torch.randperm(text.vocab_size, generator=generator)
        self.documents = draw.repeat(-(-count // len(draw)))[:count].view(4, -1).to(self.device)
        self.windowed = any(isinstance(getattr(text, name, None), int) for name in WINDOWS)
        self.half = False

    def run(
        self, ids: Tensor, labels: Tensor | None = None, positions: Tensor | None = None
    ) -> tuple[Any, Tensor, Any]:
        """Return what the model makes of `ids` [b, L], the hidden states [b, L, H], and the head's result."""
        calls: list[tuple[Tensor, Any]] = []
        hook = self.head.register_forward_hook(lambda _, args, out: calls.append((args[0], out)))
        inputs: dict[str, Any] = {"input_ids": ids, "position_ids": positions}
        inputs[self.model.shifted_labels] = labels
        if labels is None and "use_cache" in self.model.order:
            inputs["use_cache"] = False
        try:
            result = self.forward(**{k: v for k, v in inputs.items() if v is not None})
        finally:
            hook.remove()
        if not calls:
            raise UserError(f"{self.name} does not call its output head in its forward", code="head-unused")
        hidden, out = calls[-1]
        return result, hidden.reshape(*ids.shape, -1).float(), out

    def worst(self, *numbers: float) -> list[float]:
        """Return the largest of each number over all ranks, which decide alike; NaN counts as infinite."""
        values = torch.tensor(numbers, dtype=torch.float64).nan_to_num(nan=torch.inf).to(self.device)
        if self.collective and dist.is_initialized():
            values = values.float()
            dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return values.tolist()

    def check_head(self) -> None:
        """Raise UserError where the fused loss is not that of the model's logits."""
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
        broken, columns, *errors = self.worst(broken, columns, *errors)
        if broken:
            problem = f"{self.name} computes values that are not finite: its weights are damaged"
            raise UserError(problem, code="not-finite")
        if columns or max(errors) > HEAD_TOLERANCE[self.half]:
            problem = f"{self.name} does something to its logits that the fused head does not know"
            cure = "train from logits with emo.pipeline.loss.models.hf.loss_function"
            raise UserError(f"{problem} (off by {max(errors):.2g}); {cure}", code="head-differs")

    def packs(self) -> bool:
        """Return True where the model's present `packing` computes a packed document as if it were alone.

        Raises UserError for a model that is not causal.
        """
        n, (x, other_x, y, other_y) = self.length, self.documents
        rows = torch.stack([torch.cat(pair) for pair in ((x, y), (other_x, y), (x, other_y))])
        positions = torch.arange(n, device=self.device).repeat(2).expand(len(rows), -1)
        try:
            packed = self.run(rows, rows, positions)[1]
        except (TypeError, ValueError, RuntimeError, IndexError) as error:
            if isinstance(error, torch.cuda.OutOfMemoryError):
                raise
            if self.collective and dist.is_initialized():
                dist.barrier()  # fails where the reason is a rank that is gone
            log.debug("%s with packing by %s: %s", self.name, self.model.packing, one_line(error))
            return False
        alone = self.run(self.documents, self.documents)[1][2]
        leak = float((packed[0, n:] - packed[1, n:]).abs().max())
        rounding = float((packed[0, :n] - packed[2, :n]).abs().max())
        apart = float((packed[0, n:] - alone).norm() / alone.norm())
        largest, tolerance = float(packed.abs().max()), ALONE_TOLERANCE[self.half]
        leak, rounding, apart = self.worst(leak, rounding, apart)
        if rounding > tolerance * largest:  # it moved with a later document
            raise UserError(f"{self.name} is not causal: a token sees those after it", code="not-causal")
        return leak <= 4 * rounding + 1e-6 * largest and apart <= tolerance


def probe_model(
    model: Any,
    forward: Callable[..., Any] | None = None,
    *,
    packed: bool = True,
    collective: bool = False,
    device: torch.device | None = None,
) -> str:
    """Return the `packing` that it gives a fused model: `positions`, `mask` or `refused`.

    forward: the callable of training (an engine, a wrapped model), by default the model. packed: rows hold
    several documents, so that `refused` is an error. collective: all ranks call and agree. Raises UserError
    for a family whose logits the fused head does not reproduce, whose values are not finite, that is not
    causal, or that lets packed documents see each other.
    """
    run = model if forward is None else forward
    root = run if isinstance(run, nn.Module) else model
    with torch.no_grad(), _quiet(root, model), torch.compiler.set_stance("force_eager"):
        probe = Probe(model, run, collective, device)
        probe.check_head()
        model.packing = "positions"
        separate = probe.packs()
        has_bounds = by_segments(model.config._attn_implementation)
        if not separate and not probe.windowed and not has_bounds:
            model.packing = "mask"
            separate = probe.packs()
    if not separate:
        model.packing = "refused"
        if packed:
            raise UserError(refusal(model), code="packing")
    if model.packing == "mask":
        log.info("%s ignores restarting positions: documents in a row are separated by a mask", probe.name)
    return model.packing


@contextlib.contextmanager
def _quiet(root: nn.Module, model: Any) -> Iterator[None]:
    """Switch dropout off within the block, and let the head compute the likelihood alone."""
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
