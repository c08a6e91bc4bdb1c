"""Merge models of one architecture into one model, tensor by tensor, without loading any of them as a whole.

    linear           sum of w_i * model_i, by default their mean. A base and a tuned model: WiSE-FT
                     (Wortsman et al. 2022, arXiv 2109.01903)
    slerp            rotation from the first to the second model by w, for each tensor
    task_arithmetic  base + sum of w_i * (model_i - base) (Ilharco et al. 2023, arXiv 2212.04089)
    ties             the same, after trimming and with elected signs (Yadav et al. 2023, arXiv 2306.01708)

PEFT computes the last two.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from emo.common.errors import UserError, one_line
from emo.common.io.files import reset_modes, write_text
from emo.common.io.weights import CONFIG, OLD_BUFFERS, load_causal_lm, load_model_config, shard_names
from emo.data_prep.encoding.tokenizer import load_tokenizer, tokenizer_fingerprint

from ..control.run_dir import EXPORT_INFO, read_export_info
from .export import write_shards

WEIGHTS = "model.safetensors"
HEAD = "lm_head.weight"
# Keys of a configuration in which models of one architecture may differ.
NOT_ARCHITECTURE = (
    *("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
)
# Facts in export.json that also hold for the merged model.
SHARED = ("origin", "template", "template_variables", "reasoning")


class Merge(NamedTuple):
    """How to merge."""

    method: Literal["linear", "slerp", "task_arithmetic", "ties"]
    weights: tuple[float, ...]  # of each model. slerp has one: 0 is the first model and 1 is the second
    density: float = 0.5  # share of the largest changes that ties keeps in each tensor


class Checkpoint:
    """The tensors in the safetensors files of a model directory."""

    def __init__(self, directory: Path) -> None:
        """Open the files. Raises UserError if there are none."""
        self.directory = directory
        index = directory / f"{WEIGHTS}.index.json"
        names: dict[str, str] = {}
        try:
            if index.is_file():
                names = shard_names(index)
            elif (directory / WEIGHTS).is_file():
                with safe_open(directory / WEIGHTS, "pt") as file:
                    names = dict.fromkeys(file.keys(), WEIGHTS)
            names = {name: file for name, file in names.items() if not OLD_BUFFERS.search(name)}
            self._files = {name: safe_open(directory / name, "pt") for name in set(names.values())}
        except (OSError, SafetensorError) as error:
            raise _damaged(directory, error) from None
        if not names or not (directory / CONFIG).is_file():
            problem = f"{directory} is not a model directory with {CONFIG} and {WEIGHTS}"
            raise UserError(f"{problem}. Name one, for example the export of a run", code="merge")
        self.names = names

    def read(self, name: str) -> Tensor:
        """Return a tensor in the dtype of its file."""
        try:
            tensor: Tensor = self._files[self.names[name]].get_tensor(name)
        except SafetensorError as error:
            raise _damaged(self.directory, error) from None
        return tensor


def merge_tensors(tensors: Sequence[Tensor], base: Tensor | None, merge: Merge) -> Tensor:
    """Return the merged tensor in float32.

    Args:
        tensors: The tensor of each model.
        base: The tensor of the base model, for task_arithmetic and ties.
        merge: How to merge.
    """
    values = [tensor.float() for tensor in tensors]
    if merge.method == "slerp":
        return _slerp(values[0], values[1], merge.weights[0])
    if merge.method == "linear":
        return torch.stack([w * value for w, value in zip(merge.weights, values, strict=True)]).sum(0)
    from peft.utils.merge_utils import task_arithmetic, ties

    assert base is not None
    changes = [value - base.float() for value in values]
    weights = torch.tensor(merge.weights)
    if merge.method == "ties":
        return base.float() + ties(changes, weights, merge.density)
    return base.float() + task_arithmetic(changes, weights)


def _slerp(a: Tensor, b: Tensor, t: float) -> Tensor:
    """Return the spherical interpolation of two tensors, taken as vectors. Nearly parallel ones: linear."""
    cosine = torch.nn.functional.cosine_similarity(a.flatten(), b.flatten(), dim=0, eps=1e-12).clamp(-1, 1)
    angle = torch.arccos(cosine)
    if torch.sin(angle) < 1e-4:
        return torch.lerp(a, b, t)
    return (torch.sin((1 - t) * angle) * a + torch.sin(t * angle) * b) / torch.sin(angle)


def _architecture(directory: Path) -> dict[str, object]:
    """Return the configuration with the defaults of its class, which published files may lack."""
    try:
        settings: dict[str, object] = load_model_config(directory).to_dict()
    except (OSError, ValueError) as error:
        raise _damaged(directory, error) from None
    return _without_names(settings)


def _without_names(settings: Mapping[str, object]) -> dict[str, object]:
    """Return settings without those that do not describe the architecture, also in nested ones."""
    kept = ((key, value) for key, value in settings.items() if key not in NOT_ARCHITECTURE)
    return {key: _without_names(value) if isinstance(value, dict) else value for key, value in kept}


def _damaged(directory: Path, error: Exception) -> UserError:
    return UserError(f"{directory} is damaged: {one_line(error, 160)}", code="merge")


def _check_alike(models: Sequence[Checkpoint]) -> None:
    """Raise UserError unless all models have the same configuration, tensors and vocabulary."""
    first, *others = models
    settings = _architecture(first.directory)
    pieces = tokenizer_fingerprint(load_tokenizer(first.directory), None)
    for other in others:
        where = f"{first.directory} and {other.directory}"
        theirs = _architecture(other.directory)
        keys = settings.keys() | theirs.keys()
        if different := sorted(key for key in keys if settings.get(key) != theirs.get(key)):
            problem = f"{where} differ in {different[0]} of {CONFIG}"
            raise UserError(f"{problem}, so they cannot be merged", code="merge")
        tied = {HEAD} if settings.get("tie_word_embeddings") else set()  # some files repeat the embedding
        if names := sorted(name for name in first.names.keys() ^ other.names.keys() if name not in tied):
            raise UserError(f"{where} have different tensors, for example {names[0]}", code="merge")
        if tokenizer_fingerprint(load_tokenizer(other.directory), None) != pieces:
            raise UserError(f"{where} have different tokenizers, so they cannot be merged", code="merge")


def merge_models(models: Sequence[Path], base: Path | None, merge: Merge, target: Path) -> None:
    """Write the merged model to a new directory, with the configuration and tokenizer of the last model.

    Raises UserError for models that differ in more than their weights, or if the result cannot be loaded.
    """
    if target.exists():
        raise UserError(f"{target} exists. Give a new directory", code="export-target")
    opened = [Checkpoint(directory) for directory in models]
    start = None if base is None else Checkpoint(base)
    compared = [*opened, *([] if start is None else [start])]
    _check_alike(compared)
    common = set.intersection(*(set(model.names) for model in compared))

    def merged() -> Iterator[tuple[str, Tensor]]:
        for name in (name for name in opened[-1].names if name in common):
            tensors = [model.read(name) for model in opened]
            result = merge_tensors(tensors, None if start is None else start.read(name), merge)
            if not bool(result.isfinite().all()):
                raise UserError(f"{name} of the merged model is not finite", code="not-finite")
            yield name, result.to(tensors[-1].dtype).contiguous()

    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        write_shards(partial, merged())
        _write_settings(models, base, merge, partial)
        reset_modes(partial)
        if load_causal_lm(partial, dtype="auto").faulty:
            raise UserError(f"{models[-1]}: its configuration does not fit the merged weights", code="merge")
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_settings(models: Sequence[Path], base: Path | None, merge: Merge, target: Path) -> None:
    """Copy the files of the last model except its weights, and write what was merged."""
    for path in models[-1].iterdir():
        is_weights = path.suffix in (".safetensors", ".bin") or path.name.endswith(".index.json")
        if path.is_file() and not is_weights and path.name != "README.md":  # it describes another model
            shutil.copyfile(path, target / path.name)
    info: dict[str, object] = {}
    with contextlib.suppress(OSError, ValueError):
        info = read_export_info(models[-1])
    # The run, step and objective of one of the models are not those of the merged one.
    info = {key: value for key, value in info.items() if key in SHARED}
    facts = merge._asdict() | {"models": [str(model) for model in models], "base": base and str(base)}
    write_text(target / EXPORT_INFO, json.dumps(info | {"merged": facts}, indent=1))
