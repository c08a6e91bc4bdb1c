"""Load a Hugging Face causal LM and prepare it for training: attention, adapters and the fused head.

The model of `build_model` returns `LossSums` from `forward(input_ids, labels=..., position_ids=...)`. Without
labels its forward is the ordinary one, so generation and export work unchanged.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from emo.common.context_length import context_length
from emo.common.errors import UserError, one_line
from emo.common.io.files import reset_modes
from emo.common.io.hub import explain_hub_error
from emo.common.io.weights import downloaded_directory, load_causal_lm, load_model_config, sampled_digest
from emo.data_prep.encoding.tokenizer import load_tokenizer, tokenizer_fingerprint
from emo.data_prep.shards.format import Manifest

from ..config import RunConfig
from ..control.run_dir import INITIAL
from ..control.world import NETWORK, broken_device, gather_objects, lost_a_peer
from ..engine.activations import offload_checkpoints, tile_mlps
from ..engine.average import local_values
from ..engine.device.devices import family_supports, usable_attention
from ..engine.engine import Engine
from ..loss import fuse_model, probe_model
from ..loss.models.head import packing_problem, uses_segments
from .adapters import add_lora, load_adapter
from .config import ModelConfig, RopeConfig
from .kernels import use_liger
from .nf4 import full_values, nf4_options, prepare_nf4
from .objective.build import Losses
from .rope import check_rope, extend_rope

log = logging.getLogger(__name__)


def model_config(config: ModelConfig, online: bool = True, key: str = "model.path") -> PretrainedConfig:
    """Return the Hugging Face configuration of a model.

    Raises UserError if it cannot be read or contradicts `model.architecture`. Messages call the model `key`.
    If not `online`, `architecture` replaces a model that is not on this machine.
    """
    if config.path is None or (not online and config.architecture and not Path(config.path).exists()):
        keys = dict(config.architecture or {})
        try:
            return extend_rope(AutoConfig.for_model(keys.pop("model_type"), **keys), config.rope)
        except (ValueError, StrictDataclassError) as error:
            raise UserError(f"model.architecture: {one_line(error)}", code="architecture") from None
    try:
        hf_config = load_model_config(config.path, config.revision)
    except (OSError, ValueError) as error:
        raise UserError(_describe_load_error(config.path, error, key), code="model") from None
    for name, actual, expected in _differences(hf_config, config.architecture or {}):
        problem = f"model.path={config.path} has {name}={actual!r}, model.architecture has {expected!r}"
        cure = "Set model.architecture=null to use the settings of the model, or correct one of them"
        raise UserError(f"{problem}. {cure}.", code="architecture")
    return extend_rope(hf_config, config.rope)


def _differences(
    hf_config: PretrainedConfig, expected: Mapping[str, object]
) -> Iterator[tuple[str, Any, Any]]:
    """Yield name, actual and expected value of each setting that differs, also in nested configurations."""
    for name, value in expected.items():
        actual = getattr(hf_config, name, None)
        if isinstance(actual, PretrainedConfig) and isinstance(value, dict):
            yield from ((f"{name}.{key}", *values) for key, *values in _differences(actual, value))
        elif actual != value:
            yield name, actual, value


def check_context(config: PretrainedConfig, block: int) -> None:
    """Raise UserError if rows of `block` tokens are longer than the model's context."""
    context = context_length(config.get_text_config())
    if context is not None and block > context:
        problem = f"rows of {block} tokens are longer than the model's context of {context}"
        cure = f"Set data.sequence_len={context} or less and prepare the data again, or set model.rope."
        raise UserError(f"{problem}. {cure}", code="context")


def check_shape(config: PretrainedConfig, key: str | None = None) -> None:
    """Raise UserError for a model without heads or layers of one kind. key: its name in messages."""
    for name in ("num_attention_heads", "num_hidden_layers", "hidden_size", "vocab_size"):
        value = None
        with contextlib.suppress(Exception):  # a property that fails, or one for single layers
            value = getattr(config.get_text_config(), name)
        if type(value) is not int or value < 1:
            problem = (
                f"{key + ': ' if key else ''}model_type {config.model_type} has no {name} for all layers"
            )
            raise UserError(f"{problem}; choose a transformer", code="architecture")


def check_fits(config: PretrainedConfig, model: ModelConfig, manifest: Manifest) -> None:
    """Raise UserError for data that this model cannot read: too many ids, long rows, another tokenizer."""
    text = config.get_text_config()
    if manifest.used_ids > text.vocab_size:
        problem = f"the data use {manifest.used_ids} token ids, but the model's head has {text.vocab_size}"
        cure = "Set data.tokenizer to the model's own and prepare the data again (data.template chat and "
        cure += "alpaca add no tokens), or resize the model's embedding (resize_token_embeddings)."
        raise UserError(f"{problem}. {cure}", code="vocabulary")
    check_context(config, manifest.block)
    if model.path is None:
        return
    try:
        tokenizer = load_tokenizer(model.path, model.revision)
    except UserError:
        log.warning("%s has no tokenizer: cannot check that it fits the data", model.path)
        return
    if tokenizer_fingerprint(tokenizer, manifest.eos_id) != manifest.tokenizer_fingerprint:
        problem = f"the data were prepared with a tokenizer that differs from that of {model.path}"
        raise UserError(
            f"{problem}. Set data.tokenizer={model.path} and prepare the data again.", code="vocabulary"
        )


def write_initial_weights(config: RunConfig) -> None:
    """Initialise a new model and save it, so that every number of ranks starts from the same weights."""
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
    path: str,
    revision: str | None,
    dtype: str,
    attn: str,
    key: str = "model.path",
    linear_dtype: str | None = None,
    rope: RopeConfig | None = None,
    alone: bool = False,
    trained: bool = True,
) -> PreTrainedModel:
    """Load the weights of a causal LM. Under ZeRO-3 they are partitioned while they load (see engine.py).

    Raises UserError, on all ranks that load, for weights that are damaged or incomplete.

    Args:
        path: Directory or hub id.
        revision: Commit of the hub model.
        dtype: Name of the torch dtype of the weights.
        attn: Attention implementation.
        key: The setting that names the model, for messages.
        linear_dtype: Another type for the linear layers except the head: nf4.
        rope: Changes of the rotary position embeddings.
        alone: Only this rank loads, and on the CPU.
        trained: The model is trained, for which its weights must not be quantized.
    """
    torch_dtype = getattr(torch, dtype)
    options = {"dtype": torch_dtype, "attn_implementation": attn}
    options |= nf4_options(linear_dtype, torch_dtype, on_cpu=alone)
    try:
        stored = load_model_config(path, revision)
        options |= {} if linear_dtype else _dequantizing_options(stored)
        if rope is not None:
            options["config"] = extend_rope(stored, rope)
        loaded = load_causal_lm(path, revision, **options)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        if broken_device(error) or broken_device(error, NETWORK) or lost_a_peer(error):
            raise  # loading also uses the GPU and, under ZeRO-3, the network
        raise UserError(_describe_load_error(path, error, key), code="model") from None
    for problem, names in (
        ("lacks", loaded.missing),
        ("has another shape for", loaded.mismatched),
        ("has tensors that this kind of model does not have:", loaded.unexpected),
    ):
        if names:
            listed = f"{', '.join(names[:3])} ({len(names)} in all)"
            raise UserError(
                f"{key}={path} {problem} {listed}. It is damaged, or not a causal LM.", code="model"
            )
    if loaded.fault is not None:
        raise UserError(
            f"{key}={path} {loaded.fault}. Correct it, or set {key} to another model.", code="model"
        )
    if trained and linear_dtype is None and getattr(loaded.model, "is_quantized", False):
        problem = f"{key}={path} has quantized weights, which cannot be trained"
        cure = "Name the model that it was made from, and set model.lora.base_dtype=nf4 to load it in 4 bits"
        raise UserError(f"{problem}. {cure}", code="quantized-model")
    check_rope(loaded.model, rope)
    broken = _find_nonfinite_parameter(loaded.model)
    if not alone and dist.is_initialized():
        broken = next(filter(None, gather_objects(broken)), "")
    if broken:
        raise UserError(
            f"{key}={path} is damaged: {broken} has values that are not finite", code="not-finite"
        )
    return loaded.model


def _dequantizing_options(config: Any) -> dict[str, Any]:
    """Return the options with which transformers loads a published model in FP8 or MXFP4 as plain weights."""
    from transformers import FineGrainedFP8Config, Mxfp4Config

    stored = getattr(config, "quantization_config", None) or {}
    kinds = {"fp8": FineGrainedFP8Config, "mxfp4": Mxfp4Config}
    method = stored.get("quant_method") if isinstance(stored, dict) else stored.quant_method
    kind = kinds.get(str(method))
    return {} if kind is None else {"quantization_config": kind(dequantize=True)}


def _find_nonfinite_parameter(model: PreTrainedModel) -> str:
    """Return the name of a parameter with NaN or infinite values on this rank, or an empty text."""
    broken = ""
    rank = dist.get_rank() if dist.is_initialized() else 0
    for name, parameter in model.named_parameters():
        partitioned = hasattr(parameter, "ds_tensor")  # under ZeRO-3
        values = local_values(parameter, rank) if partitioned else full_values(parameter)
        in_memory = values.numel() and values.device.type != "meta"  # partitions on NVMe are not
        if in_memory and not bool(torch.isfinite(torch.stack(values.aminmax())).all()):
            broken = broken or name
    return broken


def _describe_load_error(path: str, error: Exception, key: str) -> str:
    if Path(path).exists():
        return f"{key}={path} cannot be loaded: {one_line(error)}"
    return f"{key}: {explain_hub_error(path, error)}. Without network, download it first or set a directory."


def load_base(config: RunConfig, attn: str, alone: bool = False) -> PreTrainedModel:
    """Load the weights that training starts from, in 4 bits if the recipe sets it. See `load_pretrained`."""
    linear_dtype = config.model.linear_dtype
    options: Any = {"linear_dtype": linear_dtype, "rope": config.model.rope, "alone": alone}
    model = load_pretrained(*config.initial_weights(), config.model.dtype, attn, **options)
    if linear_dtype is not None:
        prepare_nf4(model)
        path, revision = config.initial_weights()
        directory = Path(path) if Path(path).is_dir() else downloaded_directory(path, revision)
        model.quantized_from = sampled_digest(directory)  # see `frozen_sum`
    return model


def build_model(config: RunConfig, losses: Losses) -> nn.Module:
    """Load the model and prepare it for training: kernels, adapters, fused head, activation checkpointing."""
    shared = config.train.sequence_parallel > 1
    attn = usable_attention(config.model, load_model_config(*config.initial_weights()), shared)
    model = load_base(config, attn)
    model.config.use_cache = False
    if config.model.kernels is not None:
        use_liger(model)
    trained: nn.Module = model
    if config.model.lora is not None:  # before the head is fused: peft finds layers by class
        trained = add_lora(model, config.model, config.train.seed)
        if config.model.lora.path is not None:  # `check_run` has checked that it fits
            load_adapter(trained, config.model.lora.path)
    smoothing = config.objective.label_smoothing
    z_loss = config.objective.z_loss
    fuse_model(model, losses.objective, losses.cost, z_loss=z_loss, label_smoothing=smoothing)
    if config.model.neftune_noise_alpha:
        add_embedding_noise(model, config.model.neftune_noise_alpha, config.train.sequence_parallel)
    if config.model.tiled_mlp:
        tile_mlps(model, model.config.get_text_config().hidden_size)
    if config.model.activation_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if config.model.activation_checkpointing == "offload":
        offload_checkpoints(model)
    return trained


def add_embedding_noise(model: PreTrainedModel, alpha: float, parts: int = 1) -> None:
    """Add noise from [-alpha, alpha] / sqrt(L * d) to embeddings [batch, L / parts, d] in steps of training.

    This is NEFTune (Jain et al. 2023, arXiv 2310.05914), where L is the length of packed rows, which `parts`
    ranks may share. Validation and teachers, which need no gradient, have no noise.
    """

    def add_noise(module: nn.Module, inputs: Any, embedded: torch.Tensor) -> torch.Tensor:
        if not (module.training and torch.is_grad_enabled()):
            return embedded
        limit = alpha / math.sqrt(embedded.shape[1] * parts * embedded.shape[2])
        return embedded + torch.empty_like(embedded).uniform_(-limit, limit)

    model.get_input_embeddings().register_forward_hook(add_noise)


def packed(manifests: Sequence[Manifest]) -> bool:
    """Return whether any row of these data sets holds several documents."""
    return any(shard.segments > shard.rows for manifest in manifests for shard in manifest.shards)


def check_model(engine: Engine, config: RunConfig, manifests: Sequence[Manifest]) -> None:
    """Check the fused loss against the model's own logits before the first step. All ranks must call.

    If the attention that `auto` chose does not separate the documents of a row, another one is tried. Raises
    UserError if the losses differ, or if rows of `manifests` (training and validation data) are packed and
    the model cannot separate documents.
    """
    base: Any = engine.model
    if config.model.lora is not None:
        base = base.get_base_model()
    settings: Any = {"packed": False, "collective": True, "device": engine.world.device}
    verdict = probe_model(base, engine.ds, **settings)
    chosen = base.config._attn_implementation
    shared = engine.world.sequence > 1
    automatic = config.model.attn_implementation == "auto" and not shared
    if verdict == "refused" and uses_segments(chosen) and automatic:
        other = "sdpa" if family_supports(base.config, "sdpa") else "eager"
        log.info("using attention %s, because %s does not separate the documents of a row", other, chosen)
        base.set_attn_implementation(other)
        verdict = probe_model(base, engine.ds, **settings)
    if verdict == "refused":
        if packed(manifests) or shared:
            raise UserError(packing_problem(base), code="packing")
        base.packing = "alone"  # rows hold one document each, followed by padding without labels
