"""The loss library for Hugging Face's Trainer, for TRL and for any training loop; examples/ has one of each.

`FusedLossMixin` goes before a Trainer class. The model's forward then ends in the fused head: logits are
never built, and `num_items_in_batch` (tokens of all ranks and accumulation steps) is the divisor.

`fuse_causal_lm` does the same for a loop of one's own.

`loss_function` returns a `compute_loss_func` for Trainer and TRL's SFTTrainer. It starts from logits,
so they exist, but nothing else of their size does except their gradient. Give it `label_smoothing`, which
Trainer does not hand on. For models whose class is not called ...ForCausalLM, such as GPT2LMHeadModel,
Trainer's losses are low by the first token of each row; `model.loss_type = "ForCausalLM"` before the Trainer
is made corrects it. TRL from 1.8 to 1.14 needs `loss_type="nll"` in its SFTConfig for such a function.

`EMOLoss` is a plain module from logits: `EMOLoss()(logits, labels, cost_embedding).backward()`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from emo.common.errors import UserError

from .. import (
    IGNORE,
    CostEmbedding,
    FusedCausalLM,
    LiveCost,
    Objective,
    fuse_model,
    get_objective,
    logits_loss,
    probe_model,
    shift_left,
)
from ..cost import is_distributed, is_partitioned
from .frozen import BaseTeacher, Frozen, LiveTeacher

Cost = CostEmbedding | LiveCost | None
Choice = str | Objective  # a name, as in a recipe, or the result of `get_objective` or `weighted_sum`
Params = dict[str, Any] | None


def chosen_objective(objective: Choice, params: Params) -> Objective:
    """Return the objective of that name with `params` bound, or the Objective itself, which has its own."""
    if params and not isinstance(objective, str):
        raise UserError(f"{objective} has its parameters already; leave params out", code="two-params")
    return get_objective(objective, **(params or {})) if isinstance(objective, str) else objective


def from_logits(objective: Choice, params: Params) -> Objective:
    """Return a chosen objective for logits. Raises UserError for a schedule, and for one with a teacher."""
    chosen = chosen_objective(objective, params).fixed()
    if chosen.against:
        cure = "use fuse_causal_lm or FusedLossMixin with teacher=MODEL"
        raise UserError(f"{chosen.name} needs a teacher; {cure}", code="needs-teacher")
    return chosen


def loss_function(
    objective: Choice = "emo", cost: Cost = None, *, params: Params = None, **options: Any
) -> Callable[..., Tensor]:
    """Return a `compute_loss_func(outputs, labels, num_items_in_batch=None)` for Trainer and TRL.

    `params` belong to the objective, which has no schedule; `options` are label_smoothing, z_loss, kernels.
    The value, in nats, is the sum over predicted tokens divided by `num_items_in_batch`, or by their number.
    """
    chosen = from_logits(objective, params)

    def compute_loss(outputs: Any, labels: Tensor, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        logits = outputs["logits"] if isinstance(outputs, dict) else outputs.logits
        sums = logits_loss(logits, shift_left(labels), chosen, cost, **options)
        return sums.loss / _divisor(sums.tokens if num_items_in_batch is None else num_items_in_batch)

    return compute_loss


def _divisor(tokens: Tensor | int) -> Tensor | int:
    """Return the number of tokens, or 1 where nothing is to be predicted: the loss is 0 then, not NaN."""
    return tokens.clamp(min=1) if isinstance(tokens, Tensor) else max(tokens, 1)


class EMOLoss(nn.Module):
    """Mean loss per predicted token in nats, from logits; `objective` may be any without a teacher.

    With `shift` (default, as in the released package) labels are aligned with the inputs and position i
    predicts label i + 1; without it logits[i] predicts labels[i]. Where a weight of an objective is a Ramp,
    set `self.objective = objective.at(step)` before every step.
    """

    def __init__(
        self, objective: Choice = "emo", *, shift: bool = True, params: Params = None, **options: Any
    ) -> None:
        super().__init__()
        self.objective = from_logits(objective, params)
        self.shift, self.options = shift, options

    def forward(
        self, logits: Tensor, labels: Tensor, cost_embedding: Tensor | CostEmbedding | None = None
    ) -> Tensor:
        """Return the mean loss of logits [..., T, V] against labels [..., T] with cost_embedding [V, H'].

        A tensor, whose rows may have any length, is normalised at every call, so that a change of it is never
        missed; a CostEmbedding is normalised already.
        """
        if isinstance(cost_embedding, Tensor):
            cost_embedding = CostEmbedding.from_weight(cost_embedding)
        target = shift_left(labels) if self.shift else labels
        sums = logits_loss(logits, target, self.objective, cost_embedding, **self.options)
        return sums.loss / _divisor(sums.tokens)


class _MeanLoss(FusedCausalLM):
    """The fused forward with Hugging Face's conventions: labels aligned with inputs in, the mean loss out."""

    shifted_labels = "shift_labels"
    aligned = False  # True once a batch's labels were aligned with its inputs

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the mean loss against `labels` [b, T], aligned with `input_ids`, or `shift_labels` [b, T].

        `stored` [b, T] stands beside whichever of the two is given. Raises UserError for labels that were
        shifted already: they would be predicted from two tokens before.
        """
        inputs = self.named(args, kwargs)
        labels, shifted = inputs.pop("labels", None), inputs.pop("shift_labels", None)
        tokens, stored = inputs.pop("num_items_in_batch", None), inputs.pop("stored", None)
        if shifted is None and labels is not None:
            ids = None if self.aligned else inputs.get("input_ids")
            if ids is not None and ids.shape == labels.shape and ids.shape[-1] > 1:
                counted = (labels != IGNORE)[..., :-1]
                same, next_ = (counted & (labels[..., :-1] == i) for i in (ids[..., :-1], ids[..., 1:]))
                counts = torch.stack([mask.sum() for mask in (counted, same, next_)])
                valid, aligned, shifted_already = counts.tolist()
                if valid >= 8 and shifted_already > 0.9 * valid > 2 * aligned:
                    problem = "labels[i] is input_ids[i + 1] already; align them, or call them shift_labels"
                    raise UserError(problem, code="labels-shifted")
                self.aligned = valid >= 8 and aligned > 0.5 * valid
            shifted = shift_left(labels)
            stored = None if stored is None else shift_left(stored)
        if shifted is None:
            return super().forward(**inputs)
        sums = self.fused_sums(shifted, inputs, stored)
        return CausalLMOutputWithPast(loss=sums.loss / _divisor(sums.tokens if tokens is None else tokens))


def fuse_causal_lm(
    model: PreTrainedModel,
    objective: Choice = "emo",
    cost: Cost = None,
    *,
    params: Params = None,
    teacher: Any = None,
    **options: Any,
) -> None:
    """Make `model(input_ids, labels=..., num_items_in_batch=...)` return the fused loss, in place.

    Without labels it works as before (generation, scoring). Parameters, their names and the saved files stay
    the same. Where a weight of an objective is a Ramp, give `objective.at(0)`, and call
    `model.get_output_embeddings().use(objective.at(step))` before every step. Under FSDP2 all ranks call it,
    before or after `fully_shard`. Under ZeRO-3 the weights can be used only through the engine: call
    `emo.pipeline.loss.probe_model(model, engine, collective=True)` when it exists.

    Args:
        model: a causal LM, or PEFT's wrapper of one. Its logits are compared with the fused head's at once.
        objective: a name, or an Objective.
        cost: a CostEmbedding, `LIVE`, or None for a frozen copy of the model's head.
        params: options of an objective given by name.
        teacher: for divergences, a frozen causal LM of the same tokens on the same device, with a head no
            smaller than the model's; or `base`, for PEFT's wrapper: the model without its adapters.
        options: z_loss, label_smoothing, memory_mb, kernels, as in `fused_linear_loss`. Logit scale and soft
            cap come from the model's configuration.
    """
    base = _fused(model, chosen_objective(objective, params).fixed(), cost, teacher, options)
    weight = base.get_output_embeddings().weight
    if not is_partitioned(weight) and not weight.is_meta:
        probe_model(base, packed=False, collective=is_distributed(weight))


def _fused(model: Any, objective: Objective, cost: Cost, teacher: Any, options: dict[str, Any]) -> Any:
    """Fuse the model inside PEFT's wrapper, which calls it, or the model itself, and return it."""
    if bool(objective.against) != (teacher is not None):
        problem = "needs a teacher; give teacher=MODEL" if objective.against else "takes no teacher"
        raise UserError(f"objective {objective.name} {problem}", code="needs-teacher")
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    head = base.get_output_embeddings()
    if cost is None and objective.needs_cost and isinstance(head, nn.Linear):
        cost = CostEmbedding.from_weight(head.weight)
    fuse_model(base, objective, cost, forward=_MeanLoss, **options)
    base.teacher = None if teacher is None else _beside(model, teacher)
    return base


def _beside(model: Any, teacher: Any) -> BaseTeacher | LiveTeacher:
    """Return the teacher of a fused model, probed."""
    if teacher == "base":
        if not hasattr(model, "disable_adapter"):
            problem = "teacher='base' is the model without its adapters, and there are none"
            raise UserError(f"{problem}; load a second copy and give that", code="no-adapters")
        return BaseTeacher(model)
    entries, most = (m.config.get_text_config().vocab_size for m in (model, teacher))
    if most < entries:
        problem = f"the teacher has {most} entries, and the model that trains has {entries}"
        raise UserError(f"{problem}; take one with as many", code="teacher-vocabulary")
    live = LiveTeacher(teacher)
    if is_partitioned(next(teacher.parameters())):
        cure = "load it before the Trainer's arguments are made"
        raise UserError(f"ZeRO-3 partitions the teacher, which has no engine; {cure}", code="teacher-sharded")
    fuse_model(teacher, get_objective("mle"), forward=Frozen)
    probe_model(teacher, packed=False)
    return live


class FusedLossMixin:
    """Put before Trainer (or SFTTrainer): trains with the fused loss of `objective`.

    Args, beside the Trainer's:
        objective: a name, or an Objective.
        params: options of an objective given by name.
        cost: a CostEmbedding, `LIVE`, or None for a frozen copy of the model's head.
        teacher: as for `fuse_causal_lm`; it is moved to the Trainer's device.
        loss_options: z_loss, label_smoothing, memory_mb, kernels, as in `fused_linear_loss`.

    The Trainer's `label_smoothing_factor` is honoured, and a Ramp follows its steps. Evaluation reports the
    same loss. No logits are built: `compute_metrics`, another `loss_type` of an SFTConfig and a mixture's
    router loss are refused, and SFTTrainer's logs lack entropy and mean_token_accuracy. Before the first loss
    the fused model is compared with its logits, and a UserError ends training where they differ.
    """

    loss_is_scaled_for_ga = True  # divided by the tokens of the whole accumulated batch

    def __init__(
        self,
        model: Any = None,
        args: Any = None,
        *positional: Any,
        objective: Choice = "emo",
        params: Params = None,
        cost: Cost = None,
        teacher: Any = None,
        loss_options: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise UserError("FusedLossMixin needs a loaded model as `model`", code="needs-model")
        for refused in ("compute_loss_func", "compute_metrics", "preprocess_logits_for_metrics"):
            if kwargs.get(refused) is not None:
                raise UserError(f"no logits are built: {refused} cannot be used", code="needs-logits")
        self._objective = chosen_objective(objective, params)
        options = dict(loss_options or {})
        if args is not None:
            smoothing = args.label_smoothing_factor
            if smoothing and options.setdefault("label_smoothing", smoothing) != smoothing:
                problem = "label_smoothing_factor and label_smoothing in loss_options differ; give one"
                raise UserError(problem, code="two-smoothings")
            liger = args.liger_kernel_config or {} if args.use_liger_kernel else {}
            # unset, the likelihood, or the same in chunks: the defaults of SFTConfig's versions
            other = getattr(args, "loss_type", None) not in (None, "nll", "chunked_nll")
            if other or liger.get("fused_linear_cross_entropy") or liger.get("cross_entropy"):
                problem = f"{self._objective} is minimised: leave loss_type out of the SFTConfig"
                raise UserError(f"{problem}, and cross-entropy out of Liger's", code="two-losses")
            if args.use_liger_kernel:
                args.liger_kernel_config = liger | {"fused_linear_cross_entropy": False}
        super().__init__(model, args, *positional, **kwargs)  # type: ignore[call-arg]
        trainer: Any = self
        parallelism = getattr(trainer.accelerator, "parallelism_config", None)
        if trainer.args.n_gpu > 1 or (parallelism is not None and parallelism.non_data_parallel_size > 1):
            problem = "FusedLossMixin is for DDP, FSDP and ZeRO: start it with torchrun or accelerate launch"
            raise UserError(problem, code="not-data-parallel")
        if getattr(trainer.model.config.get_text_config(), "output_router_logits", False):
            problem = "the fused loss has no router loss: set router_aux_loss_coef=0.0 in the SFTConfig"
            raise UserError(f"{problem}, or the model's output_router_logits=False", code="router-loss")
        # after the Trainer's constructor, which may wrap the model (PEFT) and replace its forward (TRL)
        if isinstance(teacher, nn.Module):
            teacher.to(trainer.args.device)
        self._fused: Any = _fused(trainer.model, self._objective, cost, teacher, options)
        self._probed = False
        self.model_accepts_loss_kwargs = True  # the Trainer then counts the batch's tokens,
        self._loss_shifts_labels = True  # and not the first of each row, which nothing predicts
        if hasattr(self, "_total_train_tokens"):
            absent = "the fused loss builds no logits: entropy and mean_token_accuracy are not logged"
            warnings.warn(absent, stacklevel=2)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Return loss sum / tokens of the global batch, as the Trainer's accumulation expects it."""
        trainer: Any = self
        adapter = getattr(trainer.model, "active_peft_config", None)
        prompt = getattr(adapter, "is_prompt_learning", False)  # PEFT then puts tokens before each row
        if prompt and inputs.get("position_ids") is not None:
            problem = "a learned prompt of PEFT needs rows without packing and padding_free"
            raise UserError(problem, code="prompt-packed")
        if not self._probed:  # here the weights are where training uses them, whatever wraps the model
            path = None if prompt else model
            probe_model(self._fused, path, packed=False, collective=True, device=trainer.args.device)
            self._probed = True
        if self._objective.schedule is not None:
            self._fused.get_output_embeddings().use(self._objective.at(trainer.state.global_step))
        if inputs.get("labels") is None and inputs.get("shift_labels") is None:
            raise UserError("the rows need a column `labels`, like input_ids", code="no-labels")
        inputs.pop("_prediction_loss_only", None)  # a note of TRL's to itself
        outputs = model(**inputs, num_items_in_batch=num_items_in_batch)
        loss = outputs.loss
        if num_items_in_batch is None:  # a mean over this micro-batch alone
            loss = loss / (trainer.current_gradient_accumulation_steps if model.training else 1)
        elif trainer.args.average_tokens_across_devices:  # counted over ranks that average gradients
            loss = loss * trainer.accelerator.num_processes
        if hasattr(self, "_total_train_tokens"):
            # TRL's `num_tokens`, stored where its compute_loss stores it
            if model.training:
                mask, ids = inputs.get("attention_mask"), inputs["input_ids"]
                count = mask.sum() if mask is not None else ids.new_tensor(ids.numel())
                trainer._total_train_tokens += int(trainer.accelerator.gather_for_metrics(count).sum())
            key = "train" if model.training else "eval"
            trainer._metrics[key]["num_tokens"] = [trainer._total_train_tokens]
        return (loss, outputs) if return_outputs else loss
