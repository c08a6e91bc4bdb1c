"""The model under evaluation: loaded once, and only when something has to be computed."""

from __future__ import annotations

import copy
import json
import os
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from common.errors import UserError, one_line
from data_prep.tokenizer import load_tokenizer, tokenizer_fingerprint
from eval import store

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")
DTYPES = ("auto", "float32", "bfloat16", "float16")


class EvaluatedModel:
    """A Hugging Face model directory (an export of `pipeline`, or any other) or hub id.

    dtype: of the computation; `auto` is the checkpoint's own.
    """

    def __init__(self, path: str, name: str | None = None, dtype: str = "auto") -> None:
        if dtype not in DTYPES:
            raise UserError(f"--dtype {dtype!r}; known: {', '.join(DTYPES)}")
        self.path = _local_directory(path)
        self.given = path
        self.name = name or _default_name(Path(path))
        if not self.name or "/" in self.name or self.name.startswith("."):
            raise UserError(f"--name {self.name!r} must be usable as a directory name")
        self.dtype = dtype
        if not (self.path / "config.json").is_file():
            raise UserError(f"{self.path} is not a model directory: config.json is missing")
        if not _weight_files(self.path):
            raise UserError(f"{self.path} has no weights ({', '.join(WEIGHTS[:2])})")

    @cached_property
    def digest(self) -> str:
        """Identity of weights and configuration, by content."""
        files = [*_weight_files(self.path), self.path / "config.json"]
        files += self.path.glob("*.index.json")
        return store.digest_files(self.path, files)

    @cached_property
    def tokenizer(self) -> Any:
        return load_tokenizer(self.path)

    @cached_property
    def tokenizer_digest(self) -> str:
        """Content of the tokenizer, and what it adds around a text."""
        return store.digest([tokenizer_fingerprint(self.tokenizer), self.tokenizer("a").input_ids])

    def fresh_tokenizer(self) -> Any:
        """A copy, for callers that change its padding."""
        return copy.deepcopy(self.tokenizer)

    @cached_property
    def model(self) -> Any:
        """The model in evaluation mode, on this process's GPU if there is one."""
        from transformers import AutoModelForCausalLM

        try:
            model: Any = AutoModelForCausalLM.from_pretrained(self.path, dtype=self.dtype)
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            reason = one_line(error, 200)
            raise UserError(f"cannot load {self.path}: {type(error).__name__}: {reason}") from None
        return model.to(device()).eval()

    @cached_property
    def facts(self) -> dict[str, Any]:
        """What the trainer says about this model (step, tokens, objective), if it is an export of ours."""
        path = self.path / "export.json"
        return json.loads(path.read_text()) if path.is_file() else {}


def device() -> torch.device:
    """GPU number LOCAL_RANK, else the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


def _weight_files(path: Path) -> list[Path]:
    files = [p for p in sorted(path.iterdir()) if p.suffix in WEIGHTS and p.is_file()]
    safe = [p for p in files if p.suffix == ".safetensors"]
    return safe or [p for p in files if p.name.startswith("pytorch_model")]


def _default_name(path: Path) -> str:
    """runs/emo/export -> emo; runs/emo/step-000100/hf -> emo-step-000100; else the directory's name."""
    parts = path.resolve().parts
    if parts[-1] == "export" and len(parts) > 1:
        return parts[-2]
    if parts[-1] == "hf" and len(parts) > 2:
        return f"{parts[-3]}-{parts[-2]}"
    return parts[-1]


def _local_directory(path: str) -> Path:
    if Path(path).is_dir():
        return Path(path)
    if path.count("/") != 1 or path.startswith((".", "/")):
        raise UserError(f"model directory {path} does not exist")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(path, ignore_patterns=["*.msgpack", "*.h5", "*.onnx", "*.gguf"]))
    except Exception as error:  # hub errors come in many kinds; all mean that it cannot be had
        raise UserError(
            f"{path} is neither a directory nor a model that the hub gives ({type(error).__name__})"
        ) from None
