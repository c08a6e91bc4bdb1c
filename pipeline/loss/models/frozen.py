"""A frozen causal LM as a teacher: it provides hidden states of the student's batches, and its head."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from emo.common.errors import UserError

from ..teacher import Teacher
from .head import FusedCausalLM


class FrozenCausalLM(FusedCausalLM):
    """The forward of a teacher, which can stop before the head."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return hidden states and head as a Teacher if `as_teacher` is True, else the ordinary result."""
        inputs = self.bind_arguments(args, kwargs)
        if not inputs.pop("as_teacher", False):
            return super().forward(**inputs)
        hidden = self.compute_hidden(inputs["input_ids"].numel(), inputs)
        return self.get_output_embeddings()(hidden, as_teacher=True)  # type: ignore[attr-defined]


class LiveTeacher:
    """A frozen causal LM that runs on the student's batches."""

    def __init__(self, model: Any, temperature: float = 1.0, run: Callable[..., Any] | None = None) -> None:
        """Take a model fused with `FrozenCausalLM`, and the callable that uses its weights (an engine).

        Raises UserError for a model in training mode, or with parameters that require gradients.
        """
        if model.training:
            raise UserError("the teacher is in training mode; call teacher.eval()", code="teacher-training")
        if any(parameter.requires_grad for parameter in model.parameters()):
            problem = "the teacher's parameters require gradients; call teacher.requires_grad_(False)"
            raise UserError(problem, code="teacher-gradients")
        self.temperature = temperature
        self.run = run or model

    @torch.no_grad()
    def run_batch(self, tokens: int, inputs: Mapping[str, Any]) -> Teacher:
        """Return its side of a batch."""
        return self.run(**inputs, as_teacher=True)._replace(temperature=self.temperature)


class BaseTeacher:
    """The model under its adapters, as it was before training."""

    temperature = 1.0

    def __init__(self, adapted: Any) -> None:
        """Take PEFT's wrapper of a fused model."""
        self.adapted = adapted
        self.model = adapted.get_base_model()

    @torch.no_grad()
    def run_batch(self, tokens: int, inputs: Mapping[str, Any]) -> Teacher:
        """Return its side of a batch of `tokens` tokens. It shares its frozen head with the student."""
        training = self.model.training
        self.model.eval()
        try:
            with self._replace_adapters():
                hidden = self.model.compute_hidden(tokens, inputs)
                return Teacher(hidden, None, temperature=self.temperature)
        finally:
            self.model.train(training)

    def _replace_adapters(self) -> contextlib.AbstractContextManager[None]:
        """Disable the adapters within the block."""
        return self.adapted.disable_adapter()


class SelfTeacher(BaseTeacher):
    """The model itself, as it trains."""

    def __init__(self, model: Any, temperature: float = 1.0) -> None:
        """Take a fused model."""
        self.model = model
        self.temperature = temperature

    def _replace_adapters(self) -> contextlib.AbstractContextManager[None]:
        """Keep all weights."""
        return contextlib.nullcontext()


class AdapterTeacher(BaseTeacher):
    """The model with other adapters than the trained ones."""

    def __init__(self, adapted: Any, adapter: str, temperature: float = 1.0) -> None:
        """Take PEFT's wrapper of a fused model, and the name of the other adapters."""
        super().__init__(adapted)
        self.temperature = temperature
        self.adapter = adapter
        self.layers: list[Any] = [m for m in adapted.modules() if hasattr(m, "_active_adapter")]

    @contextlib.contextmanager
    def _replace_adapters(self) -> Iterator[None]:
        """Use the other adapters within the block.

        PEFT's `set_adapter` would also change which parameters require gradients.
        """
        active = [layer._active_adapter for layer in self.layers]
        try:
            for layer in self.layers:
                layer._active_adapter = self.adapter
            yield
        finally:
            for layer, name in zip(self.layers, active, strict=True):
                layer._active_adapter = name
