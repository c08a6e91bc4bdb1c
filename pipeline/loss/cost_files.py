"""Cost embeddings from files: the output head of a checkpoint, read alone, or a file with one matrix."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from emo.common.errors import UserError, one_line
from emo.common.io.weights import load_model_config, shard_names

from .cost import CostEmbedding, NumberCost

FILES = (".safetensors", ".pt", ".pth", ".bin")


def load_cost(
    source: str,
    vocab_size: int,
    dtype: torch.dtype = torch.float32,
    cache_mb: float = 0.0,
    revision: str | None = None,
) -> CostEmbedding:
    """Return the cost embedding [V, H] of a pre-trained model, without loading that model.

    source: a model directory or hub id, of which only the output head's tensor is read (the input embedding
    where the two are tied), or a .safetensors / .pt file holding one matrix [V, H]. cache_mb: for cost rows
    of frequent targets (`CostEmbedding`). Raises UserError for a source that is missing, damaged, ambiguous,
    or of another vocabulary than `vocab_size` tokens.
    """
    path = Path(source)
    if path.suffix in FILES and not path.is_dir():
        if not path.is_file():
            raise UserError(f"cost embedding {source} does not exist", code="cost-missing")
        matrices = list(_read(path).values())
        if len(matrices) != 1:
            raise UserError(f"{source} holds {len(matrices)} matrices [V, H], not one", code="cost-shape")
        weight = matrices[0]
    else:
        weight = _head_of_model(source, revision)
    if weight.shape[0] != vocab_size:
        problem = f"{weight.shape[0]} rows but the model's vocabulary has {vocab_size}"
        raise UserError(f"cost embedding {source} has {problem}; they must agree", code="cost-vocabulary")
    if not weight.is_floating_point():
        raise UserError(f"cost embedding {source} holds {weight.dtype}, no fractions", code="dtypes")
    try:
        cost = CostEmbedding.from_weight(weight, dtype, cache_mb)
    except UserError as error:
        raise UserError(f"{source}: {error}", code=error.code) from None
    cost.fingerprint = _digest(weight)
    return cost


def number_cost(pieces: Sequence[str], vocab_size: int) -> NumberCost:
    """Return costs between the whole numbers among a tokenizer's tokens, from its `pieces` in order of ids.

    Raises UserError for a tokenizer with fewer than two of them.
    """
    values = torch.full((vocab_size,), torch.nan)
    for token, piece in enumerate(pieces[:vocab_size]):
        text = piece.strip(" \u2581\u0120")  # as tokenizers write the space before a word
        if text.isascii() and text.isdecimal():
            values[token] = min(float(text), torch.finfo(values.dtype).max)
    if int(values.isfinite().sum()) < 2:
        raise UserError("objective.cost=numbers, but no tokens are numbers", code="no-numbers")
    cost = NumberCost(values)
    cost.fingerprint = f"numbers, log {_digest(values.nan_to_num(nan=-1.0))}"
    return cost


def _digest(weight: Tensor) -> str:
    """Return the sha256 of a tensor as stored: normalised rows differ in last bits between processors."""
    content = weight.detach().contiguous().flatten().view(torch.uint8).numpy()
    return hashlib.sha256(content).hexdigest()  # type: ignore[arg-type]


def _read(path: Path, name: str | None = None) -> dict[str, Tensor]:
    """Return the tensor `name` of a file, if it holds that, or all its matrices."""
    from safetensors import safe_open

    try:
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                shapes = {key: file.get_slice(key).get_shape() for key in file.keys()}  # noqa: SIM118
                keys = [k for k, shape in shapes.items() if (k == name if name else len(shape) == 2)]
                return {key: file.get_tensor(key) for key in keys}
        content: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        tensors = {"": content} if isinstance(content, Tensor) else dict(content)
    except Exception as error:  # the operations of a damaged pickle fail in every way
        line = f"cost embedding file {path} cannot be read: {one_line(error, 160)}"
        raise UserError(line, code="cost-unreadable") from None
    matrices = {k: v for k, v in tensors.items() if isinstance(v, Tensor) and v.dim() == 2}
    return {k: v.clone() for k, v in matrices.items() if name in (None, k)}


def _head_of_model(source: str, revision: str | None) -> Tensor:
    """Return the output head's tensor of a causal LM checkpoint, read alone."""
    from transformers import AutoModelForCausalLM

    try:
        config = load_model_config(source, revision)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except UserError:
        raise
    except Exception as error:  # whatever a configuration that is damaged or made up makes of transformers
        line = "is no directory or reachable hub id of a causal LM, and no file that holds one matrix"
        line = f"cost embedding {source} {line}: {one_line(error, 200)}"
        raise UserError(line, code="cost-missing") from None
    head = model.get_output_embeddings()
    # names that a checkpoint may use for the head: the head's first, then those of a tied embedding
    tied = model.get_input_embeddings() if model.config.get_text_config().tie_word_embeddings else None
    names = [f"{n}.weight" for module in (head, tied) for n, m in model.named_modules() if m is module]
    prefix = f"{model.base_model_prefix}."
    # checkpoints of a bare base model lack the prefix
    names += [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
    for name in (*names, "embed_out.weight"):  # the last of old checkpoints, renamed by transformers
        tensor = _read_tensor(source, revision, name)
        if tensor is not None and tensor.shape != head.weight.shape:
            problem = f"has shape {list(tensor.shape)}, but its config.json says {list(head.weight.shape)}"
            raise UserError(f"cost embedding {source}: {name} {problem}", code="cost-shape")
        if tensor is not None:
            return tensor
    raise UserError(f"{source} holds no output head ({', '.join(names)})", code="cost-missing")


def _read_tensor(source: str, revision: str | None, name: str) -> Tensor | None:
    """Return tensor `name` of a checkpoint in one or many files, or None if it holds no such tensor."""
    for stem in ("model.safetensors", "pytorch_model.bin"):
        index = _checkpoint_file(source, revision, f"{stem}.index.json")
        shard = stem if index is None else shard_names(index).get(name)
        path = _checkpoint_file(source, revision, shard) if shard else None
        if path is None and index is not None and shard is not None:
            line = f"cost embedding {source}: {index.name} names {shard}, which is missing"
            raise UserError(line, code="cost-missing")
        if path is not None and (tensors := _read(path, name)):
            return tensors[name]
    return None


def _checkpoint_file(source: str, revision: str | None, name: str) -> Path | None:
    """Return a file of a local or hub checkpoint, fetched alone, or None if there is none of that name."""
    from transformers.utils import cached_file

    path = cached_file(source, name, revision=revision, _raise_exceptions_for_missing_entries=False)
    return Path(path) if path else None
