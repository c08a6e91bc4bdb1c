"""A Hugging Face causal LM made ready to train: attention, adapters, and the fused head.

`build_model` gives a model whose `forward(input_ids, labels=..., position_ids=...)` returns `LossSums` and
whose forward without labels is the ordinary one, so that generation and export work unchanged.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from emo.common.errors import UserError, nearest, one_line
from emo.common.io.files import reset_modes
from emo.common.io.weights import context_length, load_causal_lm, load_config
from emo.data_prep.encoding.tokenizer import load_tokenizer, tokenizer_fingerprint
from emo.data_prep.shards.format import Manifest

from ..config import RunConfig
from ..control.run_dir import INITIAL
from ..control.world import NETWORK, broken_device, gather_objects, lost_a_peer
from ..engine.devices import family_has, usable_attention
from ..engine.engine import Engine
from ..loss import (
    fuse_model,
    probe_model,
)
from ..loss.models.head import packing_problem, require_plain_head, uses_segments
from .config import ModelConfig
from .kernels import use_liger
from .objectives import Losses

log = logging.getLogger(__name__)

TWIN_ROWS = 64  # of the data, in which `warn_of_twins` looks
TWIN_TOKENS = 1024  # the most frequent of their tokens
USUAL_TWINS = 0.01  # of the tokens that occur; a trained head tells them apart


def model_config(config: ModelConfig, online: bool = True, key: str = "model.path") -> PretrainedConfig:
    """Return the Hugging Face configuration of a model, whose path the recipe calls `key`.

    Raises UserError when the path cannot be read or disagrees with `architecture`. With `online` false the
    recipe's `architecture` stands in for a path that is not on this machine.
    """
    if config.path is None or (not online and config.architecture and not Path(config.path).exists()):
        keys = dict(config.architecture or {})
        try:
            return AutoConfig.for_model(keys.pop("model_type"), **keys)
        except (ValueError, StrictDataclassError) as error:
            raise UserError(f"model.architecture: {one_line(error)}") from None
    try:
        hf_config = load_config(config.path, config.revision)
    except (OSError, ValueError) as error:
        raise UserError(_unreachable(config.path, error, key)) from None
    for key, value in (config.architecture or {}).items():
        if (actual := getattr(hf_config, key, None)) != value:
            problem = f"model.path={config.path} has {key}={actual!r}, and model.architecture {value!r}"
            raise UserError(f"{problem}; correct one of them")
    return hf_config


def check_context(config: PretrainedConfig, block: int) -> None:
    """Raise UserError for rows of `block` tokens that are longer than the model's context."""
    context = context_length(config.get_text_config())
    if context is not None and block > context:
        problem = f"rows of {block} tokens are longer than the model's context of {context}"
        cure = f"set data.sequence_len={context} or less and prepare again"
        raise UserError(f"{problem}; {cure}", code="context")


def check_fits(config: PretrainedConfig, model: ModelConfig, manifest: Manifest) -> None:
    """Reject data that this model cannot read: too many ids, too long blocks, another tokenizer."""
    text = config.get_text_config()
    if manifest.vocab_size > text.vocab_size:
        problem = f"the data use {manifest.vocab_size} token ids, the model's head has {text.vocab_size}"
        cure = "set data.tokenizer to the model's own and prepare again (data.template chat and alpaca add "
        cure += "no tokens), or resize the model's embedding to train added tokens (resize_token_embeddings)"
        raise UserError(f"{problem}; {cure}", code="vocabulary")
    check_context(config, manifest.block)
    if model.path is None:
        return
    try:
        tokenizer = load_tokenizer(model.path, model.revision)
    except UserError:
        log.warning("%s carries no tokenizer: cannot check that it fits the data", model.path)
        return
    if tokenizer_fingerprint(tokenizer, manifest.eos_id) != manifest.tokenizer_fingerprint:
        problem = f"the data were prepared with another tokenizer than that of {model.path}"
        raise UserError(f"{problem}; set data.tokenizer={model.path} and prepare again")


def write_initial_weights(config: RunConfig) -> None:
    """Initialise a new model on this rank and save it, so that every world size starts the same."""
    target = config.output_dir / INITIAL
    if (target / "config.json").is_file():
        return
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.train.seed)
        settings = model_config(config.model)
        model = AutoModelForCausalLM.from_config(settings, dtype=torch.float32, trust_remote_code=False)
    partial = target.with_name(target.name + ".partial")
    model.save_pretrained(partial)
    reset_modes(partial)
    partial.rename(target)


def load_pretrained(
    path: str, revision: str | None, dtype: str, attn: str, key: str = "model.path"
) -> PreTrainedModel:
    """Return a causal LM from its weights; under ZeRO-3 it is built partitioned (see engine.py).

    key: what the recipe calls the path. Raises UserError for weights that are damaged or not all there.
    """
    try:
        loaded = load_causal_lm(path, revision, dtype=getattr(torch, dtype), attn_implementation=attn)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        if broken_device(error) or broken_device(error, NETWORK) or lost_a_peer(error):
            raise  # weights go to the GPU and, under ZeRO-3, to other ranks
        raise UserError(_unreachable(path, error, key)) from None
    for problem, names in (
        ("lacks", loaded.missing),
        ("has another shape for", loaded.mismatched),
        ("holds what this kind of model has not:", loaded.unexpected),
    ):
        if names:
            listed = f"{', '.join(names[:3])} ({len(names)} in all)"
            raise UserError(f"{key}={path} {problem} {listed}: it is damaged, or no causal LM")
    if loaded.fault is not None:
        raise UserError(f"{key}={path} {loaded.fault}; correct it, or set {key} to another")
    broken = ""
    for name, parameter in loaded.model.named_parameters():
        values = getattr(parameter, "ds_tensor", parameter).detach()  # ZeRO-3: this rank's piece
        at_hand = values.numel() and values.device.type != "meta"  # a piece on NVMe is not
        if at_hand and not bool(torch.isfinite(torch.stack(values.aminmax())).all()):
            broken = broken or name
    if dist.is_initialized():
        broken = next(filter(None, gather_objects(broken)), "")
    if broken:
        raise UserError(f"{key}={path} holds values in {broken} that are not finite: it is damaged")
    return loaded.model


def build_model(config: RunConfig, losses: Losses) -> nn.Module:
    """Return the model that trains: loaded, fused, with adapters and checkpointing as configured."""
    attn = usable_attention(config.model, load_config(*config.initial_weights()))
    model = load_pretrained(*config.initial_weights(), config.model.dtype, attn)
    model.config.use_cache = False
    if config.model.kernels is not None:
        use_liger(model)
    trained: nn.Module = model
    if config.model.lora is not None:  # first: peft looks layers up by class, and the fused head is no target
        trained = add_lora(model, config.model, config.train.seed)
    smoothing, z_loss = config.objective.label_smoothing, config.objective.z_loss
    fuse_model(model, losses.objective, losses.cost, z_loss=z_loss, label_smoothing=smoothing)
    if config.model.activation_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return trained


def packed(manifests: Sequence[Manifest]) -> bool:
    """Return whether rows of some of these data hold several documents."""
    return any(shard.segments > shard.rows for manifest in manifests for shard in manifest.shards)


def check_model(engine: Engine, config: RunConfig, manifests: Sequence[Manifest]) -> None:
    """Compare the model in its engine with itself before the first step; all ranks must call.

    manifests: of all data that go through it. Raises UserError when the fused loss is not that of the model's
    own logits, or when rows are packed and the model cannot keep documents apart. Where `auto` took an
    attention that is told where documents begin and it is of no use, another is tried.
    """
    base: Any = engine.model
    if config.model.lora is not None:
        base = base.get_base_model()
    settings: Any = {"packed": False, "collective": True, "device": engine.world.device}
    verdict = probe_model(base, engine.ds, **settings)
    first = base.config._attn_implementation
    if verdict == "refused" and uses_segments(first) and config.model.attn_implementation == "auto":
        other = "sdpa" if family_has(base.config, "sdpa") else "eager"
        log.info("attention: %s; %s does not keep the documents of a row apart here", other, first)
        base.set_attn_implementation(other)
        verdict = probe_model(base, engine.ds, **settings)
    if verdict == "refused" and packed(manifests):
        raise UserError(packing_problem(base))
    if verdict == "refused":
        base.packing = "alone"  # what follows a row's one document is padding, which nobody learns from


def add_lora(model: PreTrainedModel, config: ModelConfig, seed: int) -> nn.Module:
    """Return the model with low-rank adapters, drawn from `seed`, on linear layers; all else is frozen."""
    import peft

    assert config.lora is not None
    targets = config.lora.targets
    for target in targets if isinstance(targets, list) else ():  # of one string peft says it itself
        names = [name for name, module in model.named_modules() if name and not list(module.children())]
        if not any(f".{name}".endswith(f".{target}") for name in names):
            suffixes = {name.rpartition(".")[2] for name in names if not name.endswith(".lm_head")}
            hint = nearest(target, sorted(name for name in suffixes if not name.isdigit()))
            raise UserError(f"model.lora.targets={target} names no layer of {type(model).__name__}; {hint}")
    settings = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=config.lora.r,
        lora_alpha=config.lora.alpha,
        lora_dropout=config.lora.dropout,
        target_modules=targets,
    )
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            # In the model's dtype: else float32 where ZeRO-3 builds the model, and what ZeRO-2 casts it to.
            # DeepSpeed keeps a float32 copy of whatever trains.
            adapted = peft.get_peft_model(model, settings, autocast_adapter_dtype=False)
    except (ValueError, re.error) as error:
        raise UserError(f"model.lora.targets={targets}: {one_line(error)}") from None
    require_plain_head(model)
    return adapted


def _unreachable(path: str, error: Exception, key: str) -> str:
    if Path(path).exists():
        return f"{key}={path} cannot be loaded: {one_line(error)}"
    problem = f"{key}={path} is neither a directory here nor a hub model that can be reached"
    return f"{problem}; set it to a directory, or download it where there is network (HF_HOME)"
