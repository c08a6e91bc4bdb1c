"""The loss library for Hugging Face's Trainer, for TRL and for any training loop; examples/ has one of each.

`FusedLossMixin` goes before a Trainer class. The model's forward then ends in the fused head, so no logits
are built. The loss is divided by `num_items_in_batch`, the tokens of all ranks and accumulation steps.

`fuse_causal_lm` does the same for a custom training loop.

`loss_function` returns a `compute_loss_func` for Trainer and TRL's SFTTrainer. It starts from logits. They
and their gradient are the only tensors of that size. Pass it `label_smoothing`, which Trainer does not
forward. For models whose class is not called ...ForCausalLM, such as GPT2LMHeadModel, Trainer also counts the
first token of each row, so its losses are too low. To correct that, set `model.loss_type = "ForCausalLM"`
before you create the Trainer. TRL 1.8 to 1.14 needs `loss_type="nll"` in its SFTConfig for such a function.

`EMOLoss` is a plain module on logits: `EMOLoss()(logits, labels, cost_embedding).backward()`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
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
from .frozen import BaseTeacher, FrozenCausalLM, LiveTeacher
from .head import MicroBatch

Cost = CostEmbedding | LiveCost | None
ObjectiveChoice = (
    str | Objective
)  # a name, as in a recipe, or the result of `get_objective` or `weighted_sum`
Params = dict[str, float | None] | None


def _resolve_objective(objective: ObjectiveChoice, params: Params) -> Objective:
    """Return the objective of that name with `params` bound, or the Objective itself."""
    if params and not isinstance(objective, str):
        raise UserError(f"{objective} has its parameters already; remove params", code="two-params")
    return get_objective(objective, **(params or {})) if isinstance(objective, str) else objective


def _resolve_for_logits(objective: ObjectiveChoice, params: Params) -> Objective:
    """Return an objective that works on logits. Raises UserError for a schedule or a teacher."""
    resolved = _resolve_objective(objective, params).require_fixed()
    if resolved.divergences:
        cure = "use fuse_causal_lm or FusedLossMixin with teacher=MODEL"
        raise UserError(f"{resolved.name} needs a teacher; {cure}", code="needs-teacher")
    return resolved


def loss_function(
    objective: ObjectiveChoice = "emo", cost: Cost = None, *, params: Params = None, **options: Any
) -> Callable[..., Tensor]:
    """Return a `compute_loss_func(outputs, labels, num_items_in_batch=None)` for Trainer and TRL.

    The loss, in nats, is the sum over predicted tokens divided by `num_items_in_batch`, or by their number.
    It raises UserError for a model that also returns the loss of its router, which would not be trained.

    Args:
        objective: A name, or an Objective without schedule and teacher.
        cost: Transport costs, for objectives that need them.
        params: Options of an objective given by name.
        options: Label_smoothing, z_loss, kernels.
    """
    resolved = _resolve_for_logits(objective, params)

    def compute_loss(outputs: Any, labels: Tensor, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        if getattr(outputs, "aux_loss", None) is not None:
            problem = "the model returns the auxiliary loss of its router, which this loss does not include"
            cure = "Set router_aux_loss_coef=0.0 in SFTConfig, or the model's output_router_logits=False"
            raise UserError(f"{problem}. {cure}", code="router-loss")
        logits = outputs["logits"] if isinstance(outputs, dict) else outputs.logits
        sums = logits_loss(logits, shift_left(labels), resolved, cost, **options)
        return sums.loss / _divisor(sums.tokens if num_items_in_batch is None else num_items_in_batch)

    return compute_loss


def _divisor(tokens: Tensor | int) -> Tensor | int:
    """Return the number of tokens, at least 1, so that the loss of an empty batch is 0 and not NaN."""
    return tokens.clamp(min=1) if isinstance(tokens, Tensor) else max(tokens, 1)


class EMOLoss(nn.Module):
    """Mean loss per predicted token in nats, from logits, for any objective without a teacher.

    With `shift` (the default, as in the released package) labels are aligned with the inputs and position i
    predicts label i + 1. Without it logits[i] predicts labels[i]. For an objective with a Ramp, set
    `self.objective = objective.at(step)` before every step.
    """

    def __init__(
        self, objective: ObjectiveChoice = "emo", *, shift: bool = True, params: Params = None, **options: Any
    ) -> None:
        super().__init__()
        self.objective = _resolve_for_logits(objective, params)
        self.shift = shift
        self.options = options

    def forward(
        self, logits: Tensor, labels: Tensor, cost_embedding: Tensor | CostEmbedding | None = None
    ) -> Tensor:
        """Return the mean loss of logits [..., T, V] against labels [..., T] with cost_embedding [V, H'].

        A tensor is normalised at every call, so that changes of it count. A CostEmbedding is normalised
        already.
        """
        if isinstance(cost_embedding, Tensor):
            cost_embedding = CostEmbedding.from_weight(cost_embedding)
        target = shift_left(labels) if self.shift else labels
        sums = logits_loss(logits, target, self.objective, cost_embedding, **self.options)
        return sums.loss / _divisor(sums.tokens)


class _MeanLoss(FusedCausalLM):
    """The fused forward with Hugging Face's conventions: labels aligned with inputs in, the mean loss out."""

    shifted_labels = "shift_labels"
    aligned = False  # True once the labels of a batch were aligned with its inputs

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the mean loss against `labels` [b, T], aligned with `input_ids`, or `shift_labels` [b, T].

        `stored` [b, T] has the positions of the labels that are given. Raises UserError for `labels` that are
        shifted already, since they would be predicted from two tokens earlier.
        """
        inputs = self.bind_arguments(args, kwargs)
        labels = inputs.pop("labels", None)
        shifted = inputs.pop("shift_labels", None)
        tokens = inputs.pop("num_items_in_batch", None)
        stored = inputs.pop("stored", None)
        if shifted is None and labels is None:
            return super().forward(**inputs)
        if shifted is None:
            if not self.aligned:
                self._check_alignment(inputs.get("input_ids"), labels)
            shifted = shift_left(labels)
            stored = None if stored is None else shift_left(stored)
        sums = self.fused_sums(shifted, inputs, stored)
        return CausalLMOutputWithPast(loss=sums.loss / _divisor(sums.tokens if tokens is None else tokens))

    def _check_alignment(self, ids: Tensor | None, labels: Tensor) -> None:
        """Raise UserError if most labels equal the next input. Later batches are not checked after a pass."""
        if ids is None or ids.shape != labels.shape or ids.shape[-1] < 2:
            return
        counted = (labels != IGNORE)[..., :-1]
        same, next_ = (counted & (labels[..., :-1] == i) for i in (ids[..., :-1], ids[..., 1:]))
        valid, aligned, shifted = torch.stack([mask.sum() for mask in (counted, same, next_)]).tolist()
        if valid >= 8 and shifted > 0.9 * valid > 2 * aligned:
            problem = "labels[i] equals input_ids[i + 1]; align them, or pass them as shift_labels"
            raise UserError(problem, code="labels-shifted")
        self.aligned = valid >= 8 and aligned > 0.5 * valid


def fuse_causal_lm(
    model: PreTrainedModel,
    objective: ObjectiveChoice = "emo",
    cost: Cost = None,
    *,
    params: Params = None,
    teacher: Any = None,
    **options: Any,
) -> None:
    """Make `model(input_ids, labels=..., num_items_in_batch=...)` return the fused loss, in place.

    Without labels it works as before (generation, scoring). Parameters, their names and saved files do not
    change. For an objective with a Ramp, pass `objective.at(0)`, and call
    `model.get_output_embeddings().use(objective.at(step))` before every step. Under FSDP2 all ranks call it,
    before or after `fully_shard`. Under ZeRO-3 weights are usable only through the engine: call
    `emo.pipeline.loss.probe_model(model, engine, collective=True)` when you have created it.

    Args:
        model: A causal LM, or PEFT's wrapper of one. Its logits are compared with the fused head's at once.
        objective: A name, or an Objective.
        cost: A CostEmbedding, `LIVE`, or None for a frozen copy of the model's head.
        params: Options of an objective given by name.
        teacher: For divergences, a frozen causal LM of the same tokens on the same device, with a head no
            smaller than the model's; or `base`, for PEFT's wrapper: the model without its adapters.
        options: Z_loss, label_smoothing, memory_mb, kernels, as in `fused_linear_loss`. Logit scale and soft
            cap come from the model's configuration.
    """
    base = _fuse(model, _resolve_objective(objective, params).require_fixed(), cost, teacher, options)
    weight = base.get_output_embeddings().weight
    if not is_partitioned(weight) and not weight.is_meta:
        probe_model(base, packed=False, collective=is_distributed(weight))


def _fuse(model: Any, objective: Objective, cost: Cost, teacher: Any, options: Mapping[str, Any]) -> Any:
    """Fuse the model, or the one inside PEFT's wrapper, and return it."""
    if bool(objective.divergences) != (teacher is not None):
        problem = "needs a teacher; pass teacher=MODEL" if objective.divergences else "takes no teacher"
        raise UserError(f"objective {objective.name} {problem}", code="needs-teacher")
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    head = base.get_output_embeddings()
    if cost is None and objective.needs_cost and isinstance(head, nn.Linear):
        cost = CostEmbedding.from_weight(head.weight)
    fuse_model(base, objective, cost, forward=_MeanLoss, **options)
    base.teacher = None if teacher is None else _prepare_teacher(model, teacher)
    return base


def _trains_outside_adapters(name: str, parameter: nn.Parameter, prefix: str) -> bool:
    """Return whether a parameter of a PEFT model trains, and is used also while the adapters are disabled.

    prefix: of the names of the adapters' parameters.
    """
    inside = (prefix, "modules_to_save", "prompt_encoder", "trainable_tokens_")
    return parameter.requires_grad and not any(part in name for part in inside)


def _prepare_teacher(model: Any, teacher: Any) -> BaseTeacher | LiveTeacher:
    """Return the teacher of a fused model, fused and probed."""
    if teacher == "base":
        if not hasattr(model, "disable_adapter"):
            problem = "teacher='base' needs a model with PEFT adapters; pass a second copy of the model"
            raise UserError(problem, code="no-adapters")
        prefix = getattr(model.base_model, "prefix", "prompt_encoder")  # "lora_", for example
        others = [name for name, p in model.named_parameters() if _trains_outside_adapters(name, p, prefix)]
        if others:
            problem = f"teacher='base' is the model without its adapters, but {others[0]} also trains"
            raise UserError(f"{problem}; pass a second copy of the model", code="no-adapters")
        return BaseTeacher(model)
    student_entries, entries = (m.config.get_text_config().vocab_size for m in (model, teacher))
    if entries < student_entries:
        problem = f"the teacher has {entries} entries, fewer than the {student_entries} of the model"
        raise UserError(f"{problem}; use one with the same vocabulary", code="teacher-vocabulary")
    live = LiveTeacher(teacher)
    if is_partitioned(next(teacher.parameters())):
        cure = "load it before you create the Trainer's arguments"
        raise UserError(f"ZeRO-3 partitions the teacher, which has no engine; {cure}", code="teacher-sharded")
    fuse_model(teacher, get_objective("mle"), forward=FrozenCausalLM)
    probe_model(teacher, packed=False)
    return live


class FusedLossMixin:
    """Put it before Trainer (or SFTTrainer) to train with the fused loss of `objective`.

    The Trainer's `label_smoothing_factor` applies, and a Ramp follows its steps. Evaluation reports the same
    loss. No logits are built, so `compute_metrics`, another `loss_type` of an SFTConfig and a router loss
    raise UserError, and SFTTrainer's logs lack entropy and mean_token_accuracy. Before the first loss the
    fused model is compared with its logits. A difference raises UserError.

    Args, in addition to the Trainer's:
        objective: a name, or an Objective.
        params: options of an objective given by name.
        cost: a CostEmbedding, `LIVE`, or None for a frozen copy of the model's head.
        teacher: as for `fuse_causal_lm`; it is moved to the Trainer's device.
        loss_options: z_loss, label_smoothing, memory_mb, kernels, as in `fused_linear_loss`.
    """

    loss_is_scaled_for_ga = True  # divided by the tokens of the full accumulated batch

    def __init__(
        self,
        model: Any = None,
        args: Any = None,
        *positional: Any,
        objective: ObjectiveChoice = "emo",
        params: Params = None,
        cost: Cost = None,
        teacher: Any = None,
        loss_options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise UserError("FusedLossMixin needs a loaded model as `model`", code="needs-model")
        for argument in ("compute_loss_func", "compute_metrics", "preprocess_logits_for_metrics"):
            if kwargs.get(argument) is not None:
                problem = f"{argument} needs logits, which the fused loss does not build; remove it"
                raise UserError(problem, code="needs-logits")
        self._objective = _resolve_objective(objective, params)
        options = dict(loss_options or {})
        if args is not None:
            _reconcile_arguments(args, options, self._objective)
        super().__init__(model, args, *positional, **kwargs)  # type: ignore[call-arg]
        trainer: Any = self
        _check_trainer(trainer)
        # after the Trainer's constructor, which may wrap the model (PEFT) and replace its forward (TRL)
        if isinstance(teacher, nn.Module):
            teacher.to(trainer.args.device)
        self._fused: Any = _fuse(trainer.model, self._objective, cost, teacher, options)
        self._probed = False
        self.model_accepts_loss_kwargs = True  # the Trainer then counts the tokens of the batch,
        # without the first of each row, which nothing predicts unless PEFT puts tokens before it
        adapter: Any = getattr(trainer.model, "active_peft_config", None)
        is_prompt = getattr(adapter, "is_prompt_learning", False)
        self._loss_shifts_labels = not is_prompt or adapter.peft_type == "PREFIX_TUNING"
        if hasattr(self, "_total_train_tokens"):
            problem = "the fused loss builds no logits: entropy and mean_token_accuracy are not logged"
            warnings.warn(problem, stacklevel=2)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: MicroBatch,
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Return the loss sum divided by the tokens of the global batch, as the Trainer expects it."""
        trainer: Any = self
        adapter = getattr(trainer.model, "active_peft_config", None)
        has_prompt = getattr(adapter, "is_prompt_learning", False)  # PEFT puts tokens before each row
        if has_prompt and inputs.get("position_ids") is not None:
            problem = "PEFT's prompt learning does not work with packing or padding_free; turn them off"
            raise UserError(problem, code="prompt-packed")
        if not self._probed:  # here, because training uses the weights in the same way
            path = None if has_prompt else model
            probe_model(self._fused, path, packed=False, collective=True, device=trainer.args.device)
            self._probed = True
        if self._objective.schedule is not None:
            # After a step, evaluation takes the mean weights at this step, which do not jump.
            step = trainer.state.global_step if model.training else max(0, trainer.state.global_step - 1)
            self._fused.get_output_embeddings().use(self._objective.at(step, spaced=model.training))
        if inputs.get("labels") is None and inputs.get("shift_labels") is None:
            raise UserError("the rows need a column `labels`, aligned with input_ids", code="no-labels")
        inputs.pop("_prediction_loss_only", None)  # a private flag of TRL
        outputs = model(**inputs, num_items_in_batch=num_items_in_batch)
        loss = outputs.loss
        if num_items_in_batch is None:  # a mean over this micro-batch alone
            loss = loss / (trainer.current_gradient_accumulation_steps if model.training else 1)
        elif trainer.args.average_tokens_across_devices:  # counted over ranks that average gradients
            loss = loss * trainer.accelerator.num_processes
        if hasattr(self, "_total_train_tokens"):
            _count_tokens(trainer, model, inputs)
        return (loss, outputs) if return_outputs else loss


def _reconcile_arguments(args: Any, options: dict[str, object], objective: Objective) -> None:
    """Take label smoothing from the Trainer's arguments, and reject other losses among them."""
    smoothing = args.label_smoothing_factor
    if smoothing and options.setdefault("label_smoothing", smoothing) != smoothing:
        problem = "label_smoothing_factor and label_smoothing in loss_options differ; set one of them"
        raise UserError(problem, code="two-smoothings")
    liger = args.liger_kernel_config or {} if args.use_liger_kernel else {}
    # defaults of different versions of SFTConfig: unset, cross-entropy, or cross-entropy in chunks
    has_other_loss = getattr(args, "loss_type", None) not in (None, "nll", "chunked_nll")
    if has_other_loss or liger.get("fused_linear_cross_entropy") or liger.get("cross_entropy"):
        problem = f"the loss is {objective}; remove loss_type from the SFTConfig"
        raise UserError(f"{problem} and cross-entropy from liger_kernel_config", code="two-losses")
    if args.use_liger_kernel:
        args.liger_kernel_config = liger | {"fused_linear_cross_entropy": False}


def _check_trainer(trainer: Any) -> None:
    """Raise UserError for model parallelism or a router loss."""
    parallelism = getattr(trainer.accelerator, "parallelism_config", None)
    if trainer.args.n_gpu > 1 or (parallelism is not None and parallelism.non_data_parallel_size > 1):
        problem = "FusedLossMixin supports DDP, FSDP and ZeRO; start it with torchrun or accelerate launch"
        raise UserError(problem, code="not-data-parallel")
    if getattr(trainer.model.config.get_text_config(), "output_router_logits", False):
        problem = "the fused loss has no router loss; set router_aux_loss_coef=0.0 in the SFTConfig"
        raise UserError(f"{problem} or the model's output_router_logits=False", code="router-loss")


def _count_tokens(trainer: Any, model: nn.Module, inputs: Mapping[str, Tensor]) -> None:
    """Record TRL's metric `num_tokens`, as its compute_loss would."""
    if model.training:
        mask = inputs.get("attention_mask")
        ids = inputs["input_ids"]
        count = mask.sum() if mask is not None else ids.new_tensor(ids.numel())
        trainer._total_train_tokens += int(trainer.accelerator.gather_for_metrics(count).sum())
    key = "train" if model.training else "eval"
    trainer._metrics[key]["num_tokens"] = [trainer._total_train_tokens]
