"""A Hugging Face causal LM made ready to train: attention, adapters, and the fused head.

`build_model` gives a model whose `forward(input_ids, labels=..., position_ids=...)` returns `LossSums` and
whose forward without labels is the ordinary one, so that generation and export work unchanged.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from common.errors import UserError, one_line
from data_prep.shards import Manifest
from data_prep.tokenizer import load_tokenizer, tokenizer_fingerprint
from pipeline.config import ModelConfig, RunConfig
from pipeline.loss.cost import CostEmbedding, LiveCost, load_cost
from pipeline.loss.fused import LossSums, fuse_head
from pipeline.loss.objectives import Objective, get_objective
from pipeline.run_dir import INITIAL

log = logging.getLogger(__name__)


def model_config(config: ModelConfig, online: bool = True) -> PretrainedConfig:
    """The Hugging Face configuration of the model.

    Raises UserError when the path cannot be read or disagrees with `architecture`. With `online` false the
    recipe's `architecture` stands in for a path that is not on this machine.
    """
    if config.path is None or (not online and config.architecture and not Path(config.path).exists()):
        keys = dict(config.architecture or {})
        try:
            return AutoConfig.for_model(keys.pop("model_type"), **keys)
        except (ValueError, StrictDataclassError) as error:
            raise UserError(f"model.architecture: {_one_line(error)}") from None
    try:
        found = AutoConfig.from_pretrained(config.path, revision=config.revision)
    except (OSError, ValueError) as error:
        raise UserError(_unreachable(config.path, error)) from None
    for key, value in (config.architecture or {}).items():
        if getattr(found, key, None) != value:
            raise UserError(
                f"model.path={config.path} has {key}={getattr(found, key, None)!r}, but "
                f"model.architecture says {value!r}; correct one of them"
            )
    return found


def check_fits(config: PretrainedConfig, model: ModelConfig, manifest: Manifest) -> None:
    """Refuse data that this model cannot read: too many ids, too long blocks, another tokenizer."""
    if manifest.vocab_size > config.vocab_size:
        raise UserError(
            f"the prepared data use {manifest.vocab_size} token ids but the model's head has "
            f"{config.vocab_size}; set data.tokenizer to the model's own tokenizer and prepare again"
        )
    context = getattr(config, "max_position_embeddings", None)
    if context is not None and manifest.block > context:
        raise UserError(
            f"blocks of {manifest.block} tokens are longer than the model's context of {context}; "
            f"set data.block={context} or less and prepare again"
        )
    if model.path is None:
        return
    try:
        own = tokenizer_fingerprint(load_tokenizer(model.path, model.revision))
    except UserError:
        log.warning("%s carries no tokenizer: cannot check that it fits the data", model.path)
        return
    if own != manifest.tokenizer_fingerprint:
        raise UserError(
            f"the data were prepared with another tokenizer than that of {model.path}; "
            f"set data.tokenizer={model.path} and prepare again"
        )


def attention(choice: str) -> str:
    """Resolve `auto`: flash-attn where it is installed and there is a GPU, else SDPA; says which."""
    if choice != "auto":
        return choice
    if torch.cuda.is_available():
        try:
            import flash_attn  # noqa: F401

            log.info("attention: flash_attention_2")
            return "flash_attention_2"
        except ImportError as error:
            log.info("attention: sdpa (flash-attn cannot be imported: %s)", _one_line(error))
            return "sdpa"
    log.info("attention: sdpa (no GPU)")
    return "sdpa"


Cost = CostEmbedding | LiveCost | None


class Losses(NamedTuple):
    """What is minimised, and the transport costs that training and validation use."""

    objective: Objective
    cost: Cost  # None where the objective has no transport part, so that it pays for none
    measure: Cost  # in validation DEMD is reported for every objective, to compare them


def training_objective(config: RunConfig) -> Objective:
    """The objective that a recipe names. Raises UserError for names and parameters that are not known."""
    objective = get_objective(config.objective.name, **config.objective.params)
    if objective.dense:
        raise UserError(
            f"objective {objective.name} compares with a teacher, which a recipe cannot name; "
            "use pipeline.loss.fused from Python, or set objective.name to another"
        )
    return objective


def load_losses(config: RunConfig, vocab_size: int) -> Losses:
    """The objective and its cost embedding.

    The embedding is read from the weights as they were before training, also on resume, because the
    paper's transport cost is given a priori and stays fixed (section 3.1). The first weights of a new model
    mean nothing, so an objective without costs is not measured with them.
    """
    objective = training_objective(config)
    source = config.objective.cost
    cost: Cost = None
    if source == "pretrained" and (config.model.path is not None or objective.needs_cost):
        source = config.model.path or str(initial_weights(config))
    if source == "live":
        cost = LiveCost()
    elif source != "pretrained":
        revision = config.model.revision if source == config.model.path else None
        cache = config.objective.cost_cache_mb
        cost = load_cost(source, vocab_size, cache_mb=cache, revision=revision)
    return Losses(objective, cost if objective.needs_cost else None, cost)


@contextlib.contextmanager
def measuring(model: nn.Module, losses: Losses) -> Iterator[None]:
    """Within the block the fused head reports DEMD whatever the objective."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    training = head.spec
    head.spec = dataclasses.replace(training, cost=losses.measure)
    try:
        yield
    finally:
        head.spec = training


def initial_weights(config: RunConfig) -> Path:
    """Where a new model's first weights are kept: they are its origin, and its cost embedding's."""
    return config.run_dir / INITIAL


def write_initial_weights(config: RunConfig) -> None:
    """Initialise a new model on this rank and save it, so that every world size starts the same."""
    target = initial_weights(config)
    if (target / "config.json").is_file():
        return
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.train.seed)
        model = AutoModelForCausalLM.from_config(
            model_config(config.model), dtype=torch.float32, attn_implementation="sdpa"
        )
    partial = target.with_name(target.name + ".partial")
    model.save_pretrained(partial)
    partial.rename(target)


def load_pretrained(config: RunConfig, attn: str) -> PreTrainedModel:
    """The model from its weights; under ZeRO-3 it is built partitioned (see engine.py)."""
    path = config.model.path or str(initial_weights(config))
    try:
        return AutoModelForCausalLM.from_pretrained(
            path,
            revision=config.model.revision if config.model.path else None,
            dtype=getattr(torch, config.model.dtype),
            attn_implementation=attn,
        )
    except (OSError, ValueError) as error:
        raise UserError(_unreachable(path, error)) from None


def build_model(config: RunConfig, losses: Losses) -> nn.Module:
    """The model that trains: loaded, fused, with adapters and checkpointing as configured."""
    model = load_pretrained(config, attention(config.model.attn_implementation))
    model.config.use_cache = False
    if config.model.lora is not None:
        # Adapters first: peft looks layers up by class, and the fused head is no target.
        peft_model = add_lora(model, config.model)
    fuse_model(
        model,
        losses,
        z_loss=config.objective.z_loss,
        label_smoothing=config.objective.label_smoothing,
    )
    if config.model.activation_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return peft_model if config.model.lora is not None else model


def add_lora(model: PreTrainedModel, config: ModelConfig) -> nn.Module:
    """Wrap the linear layers of the body with low-rank adapters; everything else is frozen."""
    import peft

    assert config.lora is not None
    return peft.get_peft_model(
        model,
        peft.LoraConfig(
            task_type="CAUSAL_LM",
            r=config.lora.r,
            lora_alpha=config.lora.alpha,  # type: ignore[arg-type]
            lora_dropout=config.lora.dropout,
            target_modules=config.lora.targets,
        ),
    )


def fuse_model(model: PreTrainedModel, losses: Losses, **options: Any) -> None:
    """Give `model` the forward that ends in the fused head. Parameter names do not change."""
    config = model.config
    if getattr(config, "logits_scaling", None):  # Granite divides its logits
        options["logit_scale"] = 1.0 / config.logits_scaling
    elif getattr(config, "logit_scale", None):  # Cohere multiplies them
        options["logit_scale"] = config.logit_scale
    if getattr(config, "final_logit_softcapping", None):
        options["softcap"] = config.final_logit_softcapping
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise UserError(f"{type(model).__name__} has no linear output head to fuse")
    fuse_head(head, losses.objective, losses.cost, **options)
    ordinary = type(model)
    model.__class__ = type(f"Fused{ordinary.__name__}", (FusedForward, ordinary), {})


class FusedForward:
    """Mixed in before a causal LM's class: with labels, the forward ends in the fused loss."""

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        position_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> LossSums | Any:
        """Sums of losses over the valid labels of `input_ids` [b, L].

        labels: [b, L], already shifted, -100 where nothing is predicted. position_ids: [b, L], restarting
        at every segment; attention stays within segments. Without labels: the ordinary forward.
        """
        if labels is None:
            return super().forward(input_ids=input_ids, position_ids=position_ids, **kwargs)  # type: ignore[misc]
        if self.config._attn_implementation == "flash_attention_2":  # type: ignore[attr-defined]
            # flash-attn finds the segments from position ids only in one flattened row.
            input_ids, labels = input_ids.view(1, -1), labels.view(1, -1)
            position_ids = position_ids.view(1, -1) if position_ids is not None else None
        body = getattr(self, self.base_model_prefix)  # type: ignore[attr-defined]
        hidden = body(input_ids=input_ids, position_ids=position_ids, use_cache=False)
        return self.get_output_embeddings()(hidden.last_hidden_state, labels)  # type: ignore[attr-defined]


def _one_line(error: Exception) -> str:
    return one_line(error)


def _unreachable(path: str, error: Exception) -> str:
    if Path(path).exists():
        return f"model.path={path} cannot be loaded: {_one_line(error)}"
    return (
        f"model.path={path} is neither a directory here nor a hub model that can be reached; "
        "set model.path to a local directory, or download it where there is network (HF_HOME)"
    )
