"""A frozen causal LM as a teacher: its hidden states of the student's batches, and its head."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from emo.common.errors import UserError
from emo.pipeline.loss.cost import whole
from emo.pipeline.loss.head import FusedCausalLM
from emo.pipeline.loss.teacher import Teacher


class Frozen(FusedCausalLM):
    """A teacher's forward: it can end before the head."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the hidden states [b, L, H] for the head where asked; else the ordinary result."""
        inputs = self.named(args, kwargs)
        if not inputs.pop("before_head", False):
            return super().forward(**inputs)
        return self.before_head(inputs["input_ids"].numel(), inputs)


class LiveTeacher:
    """A frozen causal LM that goes through the student's batches."""

    def __init__(
        self, model: Any, temperature: float = 1.0, run: Callable[..., Tensor] | None = None
    ) -> None:
        """Take a model fused with `Frozen`. run: the callable through which its weights are used (an engine).

        Raises UserError for a model in training mode, or with weights that autograd would reach.
        """
        if model.training:
            raise UserError("the teacher is in training mode; call teacher.eval()", code="teacher-training")
        if any(parameter.requires_grad for parameter in model.parameters()):
            cure = "call teacher.requires_grad_(False)"
            raise UserError(f"gradients would reach the teacher; {cure}", code="teacher-gradients")
        self.model, self.temperature, self.run = model, temperature, run or model

    @contextlib.contextmanager
    def side(self, tokens: int, inputs: dict[str, Any]) -> Iterator[Teacher]:
        """Yield its side of a batch of `tokens` tokens, whose head is whole within the block."""
        with torch.no_grad():
            hidden = self.run(**inputs, before_head=True)
        head = self.model.get_output_embeddings()
        with contextlib.ExitStack() as stack:
            weight = stack.enter_context(whole(head.weight))
            bias = None if head.bias is None else stack.enter_context(whole(head.bias))
            terms = head.spec.terms
            yield Teacher(hidden, weight, bias, terms.softcap, head.spec.logit_scale, self.temperature)


class BaseTeacher:
    """The model under its adapters, as it was before training."""

    def __init__(self, adapted: Any) -> None:
        """Take PEFT's wrapper of a fused model."""
        self.adapted, self.model = adapted, adapted.get_base_model()

    @contextlib.contextmanager
    def side(self, tokens: int, inputs: dict[str, Any]) -> Iterator[Teacher]:
        """Yield its side of a batch of `tokens` tokens, whose head, which is frozen, is the student's."""
        training = self.model.training
        self.model.eval()
        try:
            with torch.no_grad(), self.adapted.disable_adapter():
                hidden = self.model.before_head(tokens, inputs)
        finally:
            self.model.train(training)
        yield Teacher(hidden, None)
