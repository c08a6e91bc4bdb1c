"""Cost embeddings from files: a checkpoint's output head, or a file with one matrix."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from emo.common.errors import UserError, one_line
from emo.common.io.weights import find_model_file, load_model_config, shard_names

from .cost import CostEmbedding, NumberCost

FILES = (".safetensors", ".pt", ".pth", ".bin")


def load_cost(
    source: str,
    vocab_size: int,
    dtype: torch.dtype = torch.float32,
    cache_mb: float = 0.0,
    revision: str | None = None,
) -> CostEmbedding:
    """Load the cost embedding [V, H] of a pre-trained model without loading the model.

    Args:
        source: A model directory or Hub id, of which only the output head is read (the input embedding if
            the two are tied), or a .safetensors / .pt file with one matrix [V, H].
        vocab_size: V.
        dtype: Dtype of the normalised rows.
        cache_mb: Memory for cost rows of frequent targets (`CostEmbedding`).
        revision: Revision of a Hub model.

    Raises:
        UserError: `source` is missing, damaged or ambiguous, or has another vocabulary.
    """
    path = Path(source)
    if path.suffix in FILES and not path.is_dir():
        if not path.is_file():
            raise UserError(f"cost embedding {source} does not exist", code="cost-missing")
        matrices = list(_read_tensors(path).values())
        if len(matrices) != 1:
            problem = f"must contain one matrix [V, H] (found: {len(matrices)})"
            raise UserError(f"cost embedding {source} {problem}", code="cost-shape")
        weight = matrices[0]
    else:
        weight = _read_head(source, revision)
    if weight.shape[0] != vocab_size:
        problem = f"{weight.shape[0]} rows, but the model's vocabulary has {vocab_size} tokens"
        raise UserError(f"cost embedding {source} has {problem}", code="cost-vocabulary")
    if not weight.is_floating_point():
        problem = f"must be floating point (got: {weight.dtype})"
        raise UserError(f"cost embedding {source} {problem}", code="dtypes")
    try:
        cost = CostEmbedding.from_weight(weight, dtype, cache_mb)
    except UserError as error:
        raise UserError(f"{source}: {error}", code=error.code) from None
    cost.fingerprint = _digest(weight)
    return cost


def number_cost(pieces: Sequence[str], vocab_size: int) -> NumberCost:
    """Return costs between the tokens that are decimal integers; `pieces` are a tokenizer's tokens by id.

    Raises UserError for a tokenizer with fewer than two such tokens.
    """
    values = torch.full((vocab_size,), torch.nan)
    for token, piece in enumerate(pieces[:vocab_size]):
        text = piece.strip(" \u2581\u0120")  # tokenizers' marks for the space before a word
        if text.isascii() and text.isdecimal():
            values[token] = min(float(text), torch.finfo(values.dtype).max)
    if int(values.isfinite().sum()) < 2:
        problem = "needs a tokenizer with at least two tokens that are numbers"
        raise UserError(f"objective.cost=numbers {problem}", code="no-numbers")
    cost = NumberCost(values)
    cost.fingerprint = f"numbers, log {_digest(values.nan_to_num(nan=-1.0))}"
    return cost


def _digest(weight: Tensor) -> str:
    """Return the sha256 of a tensor as stored. Normalised rows would differ slightly between processors."""
    content = weight.detach().contiguous().flatten().view(torch.uint8).numpy()
    return hashlib.sha256(content).hexdigest()  # type: ignore[arg-type]


def _read_tensors(path: Path, name: str | None = None) -> dict[str, Tensor]:
    """Read the tensor `name` of a file, if it is there, or all matrices."""
    from safetensors import safe_open

    try:
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                shapes = {key: file.get_slice(key).get_shape() for key in file.keys()}  # noqa: SIM118
                keys = [k for k, shape in shapes.items() if (k == name if name else len(shape) == 2)]
                return {key: file.get_tensor(key) for key in keys}
        content: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        tensors = {"": content} if isinstance(content, Tensor) else dict(content)
    except Exception as error:  # a damaged pickle can raise anything
        problem = f"cost embedding file {path} cannot be read: {one_line(error, 160)}"
        raise UserError(problem, code="cost-unreadable") from None
    matrices = {k: v for k, v in tensors.items() if isinstance(v, Tensor) and v.dim() == 2}
    return {k: v.clone() for k, v in matrices.items() if name in (None, k)}


def _read_head(source: str, revision: str | None) -> Tensor:
    """Read only the output head of a causal LM checkpoint."""
    from transformers import AutoModelForCausalLM

    try:
        config = load_model_config(source, revision)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except UserError:
        raise
    except Exception as error:  # transformers raises many kinds of errors for damaged configurations
        problem = "must be a directory or Hub id of a causal LM, or a file with one matrix"
        problem = f"cost embedding {source} {problem}: {one_line(error, 200)}"
        raise UserError(problem, code="cost-missing") from None
    head = model.get_output_embeddings()
    # possible names of the head in a checkpoint: first its own, then those of a tied embedding
    tied = model.get_input_embeddings() if model.config.get_text_config().tie_word_embeddings else None
    names = [f"{n}.weight" for module in (head, tied) for n, m in model.named_modules() if m is module]
    prefix = f"{model.base_model_prefix}."
    # checkpoints of a base model lack the prefix
    names += [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
    # names that transformers renames when it loads: of old GPT-NeoX, and of Gemma 3 with images
    for name in (*names, "embed_out.weight", "language_model.model.embed_tokens.weight"):
        tensor = _read_from_checkpoint(source, revision, name)
        if tensor is not None and tensor.shape != head.weight.shape:
            problem = f"has shape {list(tensor.shape)}, but config.json specifies {list(head.weight.shape)}"
            raise UserError(f"cost embedding {source}: {name} {problem}", code="cost-shape")
        if tensor is not None:
            return tensor
    problem = f"has no output head (looked for {', '.join(names)})"
    raise UserError(f"cost embedding {source} {problem}", code="cost-missing")


def _read_from_checkpoint(source: str, revision: str | None, name: str) -> Tensor | None:
    """Read tensor `name` of a checkpoint in one or many files; None if it is not there."""
    for stem in ("model.safetensors", "pytorch_model.bin"):
        index = find_model_file(source, revision, f"{stem}.index.json", download=True)
        shard = stem if index is None else shard_names(index).get(name)
        path = find_model_file(source, revision, shard, download=True) if shard else None
        if path is None and index is not None and shard is not None:
            problem = f"{index.name} lists {shard}, which is missing"
            raise UserError(f"cost embedding {source}: {problem}", code="cost-missing")
        if path is not None and (tensors := _read_tensors(path, name)):
            return tensors[name]
    return None
