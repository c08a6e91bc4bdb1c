"""The model under evaluation: loaded once, and only when something has to be computed.

Importing this module, and asking about files, loads neither torch nor transformers.
"""

from __future__ import annotations

import copy
import os
import re
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import UserError, one_line
from common.weights import Loaded, check_directory, load_causal_lm
from data_prep.tokenizer import load_tokenizer, tokenizer_fingerprint
from eval import store
from eval.icl.scores import NotFiniteError
from pipeline.run_dir import CONFIG, EXPORT, EXPORT_INFO, HF, checkpoints, read_export_info, step_of

if TYPE_CHECKING:
    import torch

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")
DTYPES = ("auto", "float32", "bfloat16", "float16")
# Results, figures and options such as NAME=DIR and NAME,NAME use names as they are.
NAME = re.compile(r"[^\W_][\w.+@~ -]{0,199}")


class EvaluatedModel:
    """A Hugging Face model directory (an export of `pipeline`, or any other) or hub id.

    dtype: of the computation; `auto` is the checkpoint's own.
    """

    def __init__(self, path: str, name: str | None = None, dtype: str = "auto") -> None:
        if dtype not in DTYPES:
            raise UserError(f"--dtype {dtype!r}; known: {', '.join(DTYPES)}")
        if name is not None and (not NAME.fullmatch(name) or name != name.strip()):
            raise UserError(
                f"--name {name!r} must begin with a letter or digit and hold only letters, digits, spaces "
                "and . _ - + @ ~"
            )
        self.path = _local_directory(path)
        self.given = path
        self.name = name or default_name(Path(path))
        self.dtype = dtype
        if not (self.path / "config.json").is_file():
            export = self.path / EXPORT
            hint = f"; give the run's export, {export}" if (export / "config.json").is_file() else ""
            raise UserError(f"{self.path} is not a model directory: config.json is missing{hint}")
        check_directory(self.path)
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
        """The model in evaluation mode, on this process's GPU if there is one.

        Raises UserError unless the files hold exactly the weights of a causal language model, all of them
        finite, and the tokenizer belongs to it.
        """
        try:
            loaded = load_causal_lm(self.path, dtype=self.dtype)
        except UserError:
            raise
        except Exception as error:  # whatever a damaged or foreign file makes of transformers
            if type(error).__name__ == "OutOfMemoryError":
                raise
            reason = one_line(error, 200)
            raise UserError(f"cannot load {self.given}: {type(error).__name__}: {reason}") from None
        self._require_all_weights(loaded)
        model = loaded.model
        self._require_finite(model)
        self._require_own_tokenizer(model)
        model = model.to(device()).eval()
        self._require_causal(model)
        return model

    @cached_property
    def scorer(self) -> Any:
        """The model's likelihoods, by the fastest way that its own forward confirms."""
        from eval.icl.prefix_scorer import PrefixScorer

        return PrefixScorer(self.model)

    @cached_property
    def facts(self) -> dict[str, Any]:
        """What the trainer says about this model (step, tokens, objective), if it is an export of ours."""
        try:
            facts = read_export_info(self.path)
        except (OSError, ValueError) as error:
            raise UserError(f"{self.path / EXPORT_INFO} is unreadable: {one_line(error)}") from None
        for name in ("step", "tokens"):
            if not isinstance(facts.get(name), int | None):
                raise UserError(f"{self.path / EXPORT_INFO}: {name} must be a number, not {facts[name]!r}")
        return facts

    def context_length(self) -> int | None:
        """Longest prompt the model was made for, or None when it does not say."""
        return context_length(self.model)

    def _require_all_weights(self, loaded: Loaded) -> None:
        """Weights that are missing would be random, and those left over belong to another model."""
        for kind in ("missing", "unexpected", "mismatched"):
            names = getattr(loaded, kind)
            if names:
                more = f" and {len(names) - 1} more" if len(names) > 1 else ""
                raise UserError(
                    f"{self.given} does not hold the weights of its causal language model: "
                    f"{names[0]}{more} {kind}"
                )
        if loaded.fault is not None:
            raise UserError(f"{self.given} {loaded.fault}")

    def _require_finite(self, model: Any) -> None:
        for name, weights in model.named_parameters():
            if not bool(weights.isfinite().all()):
                raise UserError(f"{self.given}: {name} contains NaN or infinite weights")

    def _require_own_tokenizer(self, model: Any) -> None:
        """Every piece needs an embedding, except special tokens that were added but never occur in text."""
        embeddings = model.get_input_embeddings().weight.shape[0]
        special = set(self.tokenizer.all_special_tokens)
        beyond = [p for p, i in self.tokenizer.get_vocab().items() if i >= embeddings and p not in special]
        if beyond:
            raise UserError(
                f"{self.given}: the tokenizer has {len(self.tokenizer)} pieces but the model has only "
                f"{embeddings} embeddings; it belongs to another model"
            )

    def _require_causal(self, model: Any) -> None:
        from eval.icl.probe import is_causal

        try:
            causal = is_causal(model)
        except NotFiniteError as error:
            raise UserError(f"{self.given}: {error}; try --dtype float32") from None
        if not causal:
            raise UserError(
                f"{self.given}: {type(model).__name__} is not a causal language model: "
                "later tokens change the scores of earlier ones"
            )


def context_length(model: Any) -> int | None:
    """Longest prompt a loaded model was made for, or None when it does not say."""
    config = model.config.get_text_config()
    for name in ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len"):
        if getattr(config, name, None):
            return int(getattr(config, name))
    return None


def device() -> torch.device:
    """GPU number LOCAL_RANK, else the CPU."""
    import torch

    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


def default_name(path: Path) -> str:
    """runs/emo/export -> emo; runs/emo/step-000100/hf -> emo-step-000100; else the directory's name.

    Characters that names cannot have become `-`.
    """
    parts = path.resolve().parts
    if parts[-1] == EXPORT and len(parts) > 1:
        return clean_name(parts[-2])
    if parts[-1] == HF and len(parts) > 2:
        return clean_name(f"{parts[-3]}-{parts[-2]}")
    return clean_name(parts[-1])


def clean_name(text: str) -> str:
    """A usable model name that looks like `text`."""
    name = re.sub(r"[^\w.+@~ -]", "-", text)[:200]
    return re.sub(r"^[\W_]+|\s+$", "", name) or "model"


def _weight_files(path: Path) -> list[Path]:
    files = [p for p in sorted(path.iterdir()) if p.suffix in WEIGHTS and p.is_file()]
    safe = [p for p in files if p.suffix == ".safetensors"]
    return safe or [p for p in files if p.name.startswith("pytorch_model")]


def _local_directory(path: str) -> Path:
    if Path(path).is_dir():
        return Path(path)
    if path.count("/") != 1 or path.startswith((".", "/")) or _of_unfinished_run(Path(path)):
        raise UserError(f"model directory {path} does not exist{_of_unfinished_run(Path(path))}")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(path, ignore_patterns=["*.msgpack", "*.h5", "*.onnx", "*.gguf"]))
    except Exception as error:  # hub errors come in many kinds; all mean that it cannot be had
        raise UserError(
            f"{path} is neither a directory nor a model that the hub gives ({type(error).__name__})"
        ) from None


def _of_unfinished_run(path: Path) -> str:
    """Why there is no such export, as the end of a sentence; empty where it would be of no run."""
    run = path.parent
    if path.name != EXPORT or not (run / CONFIG).is_file():
        return ""
    saved = checkpoints(run)
    last = f"last checkpoint: step {step_of(saved[-1])}" if saved else "no checkpoint either"
    return f": the run in {run} has no export yet ({last}); run its training command again to finish it"
