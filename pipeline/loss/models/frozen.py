"""A frozen causal LM as a teacher: its hidden states of the student's batches, and its head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from emo.common.errors import UserError

from ..teacher import Teacher
from .head import FusedCausalLM


class Frozen(FusedCausalLM):
    """A teacher's forward: it can end at the head."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return hidden states and head as a Teacher where asked; else the ordinary result."""
        inputs = self.named(args, kwargs)
        if not inputs.pop("at_head", False):
            return super().forward(**inputs)
        hidden = self.before_head(inputs["input_ids"].numel(), inputs)
        return self.get_output_embeddings()(hidden, at_head=True)  # type: ignore[attr-defined]


class LiveTeacher:
    """A frozen causal LM that goes through the student's batches."""

    def __init__(self, model: Any, temperature: float = 1.0, run: Callable[..., Any] | None = None) -> None:
        """Take a model fused with `Frozen`. run: the callable through which its weights are used (an engine).

        Raises UserError for a model in training mode, or with weights that autograd would reach.
        """
        if model.training:
            raise UserError("the teacher is in training mode; call teacher.eval()", code="teacher-training")
        if any(parameter.requires_grad for parameter in model.parameters()):
            cure = "call teacher.requires_grad_(False)"
            raise UserError(f"gradients would reach the teacher; {cure}", code="teacher-gradients")
        self.temperature, self.run = temperature, run or model

    @torch.no_grad()
    def side(self, tokens: int, inputs: dict[str, Any]) -> Teacher:
        """Return its side of a batch."""
        return self.run(**inputs, at_head=True)._replace(temperature=self.temperature)


class BaseTeacher:
    """The model under its adapters, as it was before training."""

    def __init__(self, adapted: Any) -> None:
        """Take PEFT's wrapper of a fused model."""
        self.adapted, self.model = adapted, adapted.get_base_model()

    @torch.no_grad()
    def side(self, tokens: int, inputs: dict[str, Any]) -> Teacher:
        """Return its side of a batch of `tokens` tokens; its head, which is frozen, is the student's."""
        training = self.model.training
        self.model.eval()
        try:
            with self.adapted.disable_adapter():
                return Teacher(self.model.before_head(tokens, inputs), None)
        finally:
            self.model.train(training)
