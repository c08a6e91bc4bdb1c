"""The same objectives for people who train with Hugging Face's Trainer, with TRL, or with their own loop.

Three doors, from most to least efficient:

`FusedLossMixin` goes before a Trainer class. The model's forward then ends in the fused head: logits are
never built, and `num_items_in_batch` (tokens of all ranks and accumulation steps) is the divisor.

    from transformers import Trainer
    from pipeline.hf import FusedLossMixin

    class EmoTrainer(FusedLossMixin, Trainer):
        pass

    trainer = EmoTrainer(model=model, args=args, train_dataset=dataset, objective="emo")
    trainer.train()

`loss_function` makes what Trainer and TRL's SFTTrainer take as `compute_loss_func`. It starts from logits,
so they exist, but nothing else of their size does except their gradient.

    from transformers import Trainer
    from pipeline.loss.cost import CostEmbedding
    from pipeline.hf import loss_function

    cost = CostEmbedding.from_weight(model.get_output_embeddings().weight)
    trainer = Trainer(
        model=model, args=args, train_dataset=dataset, compute_loss_func=loss_function("emo", cost)
    )
    trainer.train()

`EMOLoss` is a plain module for any loop.

    from pipeline.hf import EMOLoss

    loss = EMOLoss()(logits, labels, cost_embedding)
    loss.backward()
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from common.errors import UserError
from pipeline.loss.cost import CostEmbedding, LiveCost
from pipeline.loss.fused import IGNORE, fuse_head
from pipeline.loss.logits import logits_loss
from pipeline.loss.objectives import get_objective

Cost = CostEmbedding | LiveCost | None


def shift_left(labels: Tensor) -> Tensor:
    """Labels [..., T] aligned with inputs -> labels aligned with predictions: position i predicts i + 1."""
    return torch.cat((labels[..., 1:], labels.new_full((*labels.shape[:-1], 1), IGNORE)), dim=-1)


def loss_function(
    objective: str = "emo", cost: Cost = None, *, params: dict[str, Any] | None = None, **options: Any
) -> Callable[..., Tensor]:
    """A `compute_loss_func(outputs, labels, num_items_in_batch=None)` for Trainer and TRL.

    `params` belong to the objective; `options` are label_smoothing, z_loss, kernels. The value is the sum
    over predicted tokens divided by `num_items_in_batch`, or by their own number where that is None.
    """
    chosen = get_objective(objective, **(params or {}))

    def compute_loss(outputs: Any, labels: Tensor, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        logits = outputs["logits"] if isinstance(outputs, dict) else outputs.logits
        sums = logits_loss(logits, shift_left(labels), chosen, cost, **options)
        return sums.loss / (sums.tokens.clamp(min=1) if num_items_in_batch is None else num_items_in_batch)

    return compute_loss


class EMOLoss(nn.Module):
    """Mean loss per predicted token, from logits; `objective` may be any but `demd_dense`.

    With `shift` (default, as in the released package) labels are aligned with the inputs and position i
    predicts label i + 1; without it logits[i] predicts labels[i].
    """

    def __init__(
        self,
        objective: str = "emo",
        *,
        shift: bool = True,
        params: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.objective = get_objective(objective, **(params or {}))
        self.shift, self.options = shift, options
        self._seen: tuple[weakref.ref[Tensor], int, CostEmbedding] | None = None

    def forward(self, logits: Tensor, labels: Tensor, cost_embedding: Tensor | None = None) -> Tensor:
        """logits [..., T, V], labels [..., T], cost_embedding [V, H'] (any length of rows) -> scalar."""
        cost = None if cost_embedding is None else self._normalised(cost_embedding)
        target = shift_left(labels) if self.shift else labels
        sums = logits_loss(logits, target, self.objective, cost, **self.options)
        return sums.loss / sums.tokens.clamp(min=1)

    def _normalised(self, embedding: Tensor) -> CostEmbedding:
        """Normalise a given tensor once, not at every step; again if it was changed in place."""
        if self._seen is not None:
            tensor, version, cost = self._seen
            if tensor() is embedding and version == embedding._version:
                return cost
        cost = CostEmbedding.from_weight(embedding)
        self._seen = weakref.ref(embedding), embedding._version, cost
        return cost


class _FusedCausalLM:
    """Put before a causal LM's class: with labels, forward returns the mean loss and no logits."""

    def forward(self, input_ids: Tensor | None = None, labels: Tensor | None = None, **kwargs: Any) -> Any:
        ordinary = super().forward  # type: ignore[misc]
        shifted = kwargs.pop("shift_labels", None)
        if labels is None and shifted is None:
            kwargs.pop("num_items_in_batch", None)
            return ordinary(input_ids=input_ids, **kwargs)
        tokens = kwargs.pop("num_items_in_batch", None)
        kwargs.pop("logits_to_keep", None)
        body = self.base_model  # type: ignore[attr-defined]
        hidden = body(input_ids=input_ids, **{"use_cache": False, **kwargs})[0]
        if shifted is None:
            assert labels is not None
            shifted = shift_left(labels)
        sums = self.get_output_embeddings()(hidden, shifted)  # type: ignore[attr-defined]
        return CausalLMOutputWithPast(
            loss=sums.loss / (sums.tokens.clamp(min=1) if tokens is None else tokens)
        )


def fuse_causal_lm(
    model: PreTrainedModel,
    objective: str = "emo",
    cost: Cost = None,
    *,
    params: dict[str, Any] | None = None,
    **options: Any,
) -> None:
    """Make `model(input_ids, labels=..., num_items_in_batch=...)` return the fused loss, in place.

    Without labels it works as before (generation, scoring). Parameters, their names and the saved files
    stay the same. `cost` defaults to a frozen copy of the model's own head. Logit scale and soft cap
    are taken from the model's configuration.
    """
    chosen = get_objective(objective, **(params or {}))
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise UserError(f"{type(model).__name__} has no linear output head to fuse")
    if cost is None and chosen.needs_cost:
        cost = CostEmbedding.from_weight(head.weight)
    config = model.config.get_text_config()
    if getattr(config, "logits_scaling", None):
        options.setdefault("logit_scale", 1.0 / config.logits_scaling)
    elif getattr(config, "logit_scale", None):
        options.setdefault("logit_scale", config.logit_scale)
    if getattr(config, "final_logit_softcapping", None):
        options.setdefault("softcap", config.final_logit_softcapping)
    fuse_head(head, chosen, cost, **options)
    if not isinstance(model, _FusedCausalLM):
        ordinary = type(model)
        # the same name: Transformers writes it into the configuration of what it saves
        model.__class__ = type(ordinary.__name__, (_FusedCausalLM, ordinary), {})


class FusedLossMixin:
    """Put before Trainer (or SFTTrainer): trains with the fused loss of `objective`.

    Keyword arguments beside the Trainer's own: `objective`, `objective_params`, `cost` (a CostEmbedding,
    `LIVE`, or None for a frozen copy of the model's head), `loss_options` (z_loss, label_smoothing,
    memory_mb, kernels). Evaluation reports the same loss; it builds no logits, so `compute_metrics` is
    refused.
    """

    loss_is_scaled_for_ga = True  # divided by the tokens of the whole accumulated batch

    def __init__(
        self,
        model: Any = None,
        *args: Any,
        objective: str = "emo",
        objective_params: dict[str, Any] | None = None,
        cost: Cost = None,
        loss_options: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise UserError("FusedLossMixin needs a loaded model as `model`, not a name or model_init")
        for refused in ("compute_loss_func", "compute_metrics"):
            if kwargs.get(refused) is not None:
                raise UserError(f"FusedLossMixin builds no logits: {refused} cannot be used with it")
        base: Any = model
        if hasattr(model, "get_base_model"):  # peft
            base = model.get_base_model()  # type: ignore[operator]
        fuse_causal_lm(base, objective, cost, params=objective_params, **(loss_options or {}))
        super().__init__(model, *args, **kwargs)  # type: ignore[call-arg]
        self.model_accepts_loss_kwargs = True  # what makes the Trainer count the batch's tokens

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Loss sum / tokens of the global batch, as the Trainer's accumulation expects it."""
        outputs = model(**inputs, num_items_in_batch=num_items_in_batch)
        loss = outputs.loss
        trainer: Any = self
        if num_items_in_batch is None:  # a mean over this micro-batch alone
            loss = loss / (trainer.current_gradient_accumulation_steps if model.training else 1)
        elif trainer.args.average_tokens_across_devices:  # counted over ranks that average gradients
            loss = loss * trainer.accelerator.num_processes
        return (loss, outputs) if return_outputs else loss
