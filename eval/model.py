"""The model under evaluation: loaded once, and only when something has to be computed.

Importing this module, and asking about files, loads neither torch nor transformers.
"""

from __future__ import annotations

import copy
import logging
import os
import re
import sys
import tempfile
import warnings
from functools import cached_property
from pathlib import Path
from typing import Any

from emo.common.cli.commands import announce
from emo.common.cli.progress import show_activity
from emo.common.errors import UserError, one_line
from emo.common.io.untrusted import read_json
from emo.common.io.weights import (
    ADAPTER,
    GENERATION,
    Loaded,
    context_length,
    load_causal_lm,
    load_model_config,
    opened_files,
)
from emo.common.io.weights import CONFIG as CONFIG_JSON
from emo.data_prep.encoding.chat_templates import read_template
from emo.data_prep.encoding.chats import ChatEncoder
from emo.data_prep.encoding.tokenizer import CHAT_TEMPLATE, PROBES, load_tokenizer, save_tokenizer
from emo.data_prep.encoding.tokenizer import FILES as TOKENIZER_FILES
from emo.pipeline.control.run_dir import EXPORT, EXPORT_INFO, HF, read_export_info

from .icl.settings import NotFiniteError
from .results import store

DTYPES = ("auto", "float32", "bfloat16", "float16")
TOKENIZER_VERSION = 1  # of what `tokenizer_content` looks at
PROBED = 4096  # pieces of the vocabulary in each text that it encodes
# Results, figures and options such as NAME=DIR and NAME,NAME use names as they are.
NAME = re.compile(r"[^\W_][\w.+@~ -]{0,199}")


class EvaluatedModel:
    """A Hugging Face model directory (an export of `pipeline`, or any other) or hub id.

    dtype: of the computation; for `auto` the one that the configuration names, if it names one.
    """

    def __init__(self, path: str, name: str | None = None, dtype: str = "auto") -> None:
        if dtype not in DTYPES:
            raise UserError(f"--dtype {dtype!r}; known: {', '.join(DTYPES)}")
        if name is not None and (not NAME.fullmatch(name) or name != name.strip()):
            raise UserError(
                f"--name {name!r} must begin with a letter or digit and hold only letters, digits, spaces "
                "and . _ - + @ ~"
            )
        self.path = hub_snapshot(path)
        self.given = path
        self.name = name or default_name(Path(path))
        if not (self.path / CONFIG_JSON).is_file():
            export = self.path / EXPORT
            hint = f"; give the run's export, {export}" if (export / CONFIG_JSON).is_file() else ""
            raise UserError(f"{self.path} is not a model directory: config.json is missing{hint}")
        opened_files(self.path)  # refuses a directory without weights or settings
        self.dtype = dtype
        if dtype == "auto":  # stays, where transformers has to look at the weights
            config = read_json(self.path / CONFIG_JSON)
            stored = str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch.")
            self.dtype = stored if stored in DTYPES else "auto"

    @property
    def digest(self) -> str:
        """Identity of weights, adapter and configuration: the content of all that loading opens."""
        return self._digests[0]

    @property
    def generation_digest(self) -> str:
        """Identity of the generation settings, which decide sampled text only."""
        return self._digests[1]

    @cached_property
    def _digests(self) -> tuple[str, str]:
        with show_activity(f"{self.name}: reading the files"):
            return self._current_digests()

    def _current_digests(self) -> tuple[str, str]:
        files: tuple[list[Path], list[Path]] = ([], [])
        for path in opened_files(self.path):
            files[path.name == GENERATION].append(path)
        return store.digest_files(self.path, files[0]), store.digest_files(self.path, files[1])

    @property
    def has_adapter(self) -> bool:
        """Return whether an adapter is applied to the weights."""
        return (self.path / ADAPTER).is_file()

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer, which adds BOS and EOS as data preparation has it.

        Raises UserError when it is not the one that `tokenizer_digest` stands for.
        """
        tokenizer: Any = load_tokenizer(self.path)
        if "tokenizer_digest" in self.__dict__ and tokenizer_content(tokenizer) != self.tokenizer_digest:
            raise self._changed("tokenizer")
        return tokenizer

    @cached_property
    def tokenizer_digest(self) -> str:
        """Identity of the tokenizer by content: `tokenizer_content`, remembered for these very files."""

        def compute() -> str:
            content = tokenizer_content(self.tokenizer)
            if store.digest_files(self.path, self._tokenizer_files()) != files:
                raise self._changed("tokenizer")
            return content

        files = store.digest_files(self.path, self._tokenizer_files())
        return store.remembered("tokenizers", store.digest([TOKENIZER_VERSION, files]), compute)

    def fresh_tokenizer(self) -> Any:
        """Return a copy, for callers that change its padding."""
        return copy.deepcopy(self.tokenizer)

    def _tokenizer_files(self) -> list[Path]:
        names = [*TOKENIZER_FILES, CHAT_TEMPLATE]
        return [self.path / name for name in names if (self.path / name).is_file()]

    def files(self) -> list[Path]:
        """Return all files of the model that the identities cover."""
        return [*opened_files(self.path), *self._tokenizer_files()]

    def _changed(self, change: str) -> UserError:
        return UserError(
            f"{self.given}: its {change} changed while it was evaluated; nothing is stored, run it again",
            code="changed",
        )

    @cached_property
    def model(self) -> Any:
        """The model in evaluation mode, on this process's GPU if there is one.

        Raises UserError unless the files are those of `digest` and hold exactly the weights of a causal
        language model, all of them finite, and the tokenizer belongs to it.
        """
        announce(self.name, "weights")
        _ = self._digests  # of the files before
        with show_activity(f"{self.name}: loading weights"):
            return self._load()

    def _load(self) -> Any:
        """Return what `model` does."""
        import torch

        from .prefix_scorer import is_causal

        try:
            loaded = load_causal_lm(self.path, dtype=self.dtype)
        except (UserError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # whatever a damaged or foreign file makes of transformers
            reason = f"{type(error).__name__}: {one_line(error, 200)}"
            raise UserError(f"cannot load {self.given}: {reason}", code="model") from None
        self.require_unchanged()
        model, fault = loaded.model.eval(), self._fault(loaded)
        if fault is None:
            if torch.cuda.is_available():
                rank = int(os.environ.get("LOCAL_RANK", "0"))
                model = model.to(torch.device("cuda", rank % torch.cuda.device_count()))
            try:
                if not is_causal(model):
                    kind = type(model).__name__
                    fault = f"is a {kind}, in which later tokens change the scores of earlier ones"
            except NotFiniteError as error:
                fault = f"cannot be scored: {error}; try --dtype float32"
        if fault is not None:
            raise UserError(f"{self.given} {fault}", code="model")
        return model

    def require_unchanged(self) -> None:
        """Raise UserError when the files are no longer those of `digest` and `generation_digest`."""
        expected = self._digests
        try:
            current = self._current_digests()
        except (OSError, UserError):
            raise self._changed("files") from None
        if current != expected:
            raise self._changed("files")

    def _fault(self, loaded: Loaded) -> str | None:
        """Return why a loaded model cannot be evaluated with this tokenizer, if its weights show it."""
        for kind in ("missing", "unexpected", "mismatched"):  # random weights, or those of another model
            if names := getattr(loaded, kind):
                others = f" and {len(names) - 1} more" if len(names) > 1 else ""
                return f"does not hold the weights of its causal language model: {names[0]}{others} {kind}"
        if loaded.fault is not None:
            return loaded.fault
        for name, weights in loaded.model.named_parameters():
            if not bool(weights.isfinite().all()):
                return f"has NaN or infinite weights in {name}"
        # Every piece needs an embedding, except special tokens that were added but never occur in text.
        embeddings = loaded.model.get_input_embeddings().weight.shape[0]
        special = set(self.tokenizer.all_special_tokens)
        if any(i >= embeddings and p not in special for p, i in self.tokenizer.get_vocab().items()):
            pieces = f"its tokenizer has {len(self.tokenizer)} pieces, the model only {embeddings} embeddings"
            return f"does not fit together: {pieces}; it belongs to another model"
        return None

    @cached_property
    def scorer(self) -> Any:
        """The model's likelihoods, by the fastest way that its own forward confirms."""
        from .prefix_scorer import PrefixScorer

        return PrefixScorer(self.model)

    @cached_property
    def chat_encoder(self) -> ChatEncoder:
        """The encoder of chats by the tokenizer's own template, as training had it.

        The template gets the variables that export.json names, and the same date every day.
        """
        variables = self.facts.get("template_variables") or {}
        with tempfile.TemporaryDirectory() as name:  # in the form that training reads, whatever the files are
            saved = Path(name)
            save_tokenizer(self.path, None, saved)
            return ChatEncoder(saved, read_template(saved, self.given, variables=variables))

    @cached_property
    def facts(self) -> dict[str, Any]:
        """Return what the trainer says of this model (step, tokens, objective), if it made the export."""
        try:
            return read_export_info(self.path)
        except (OSError, ValueError) as error:
            raise UserError(f"{self.path / EXPORT_INFO} is unreadable: {one_line(error)}") from None

    @cached_property
    def ends(self) -> list[int]:
        """The ids that end a text: by generation_config.json, by config.json, and the tokenizer's EOS."""
        found = {self.tokenizer.eos_token_id}
        for path in (self.path / GENERATION, self.path / CONFIG_JSON):
            tree = read_json(path) if path.is_file() else {}
            text = tree.get("text_config")
            for part in (tree, text if isinstance(text, dict) else {}):
                named = part.get("eos_token_id")
                ids = named if isinstance(named, list) else [named]
                if not all(number is None or type(number) is int for number in ids):
                    problem = f"{path}: eos_token_id must be a token id or a list of them, not {named!r}"
                    raise UserError(problem, code="model-settings")
                found |= {*ids}
        return sorted(number for number in found if number is not None and number >= 0)

    @cached_property
    def context(self) -> int | None:
        """The longest sequence that the model reads, in tokens, or None if its configuration has no limit."""
        try:
            return context_length(load_model_config(self.path))
        except (OSError, ValueError) as error:
            raise UserError(f"cannot load {self.given}: {one_line(error, 200)}", code="model") from None


def default_name(path: Path) -> str:
    """Return the name of a model in results, for runs/emo/export or runs/emo/step-000100/hf that of the run.

    Characters that names cannot have become `-`.
    """
    parts = path.resolve().parts
    if parts[-1] == EXPORT and len(parts) > 1:
        return clean_name(parts[-2])
    return clean_name(f"{parts[-3]}-{parts[-2]}" if parts[-1] == HF and len(parts) > 2 else parts[-1])


def clean_name(text: str) -> str:
    """A usable model name that looks like `text`."""
    name = re.sub(r"[^\w.+@~ -]", "-", text)[:200]
    return re.sub(r"^[\W_]+|\s+$", "", name) or "model"


def tokenizer_content(tokenizer: Any) -> str:
    """Return the identity of what a tokenizer does, the same for every form of its files.

    It is a digest of the vocabulary, the special tokens and the ids of texts in which all pieces stand side
    by side, out of order: they show merges, text rules, and what is added around a text.
    """
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    pieces = [tokenizer.convert_tokens_to_string([piece]) for piece, _ in vocabulary]
    texts = ["", "a", " a", "\n\na  b", *PROBES]
    step = 7919 if len(pieces) % 7919 else 7907  # a prime that does not divide their number: all come
    order = [pieces[i * step % len(pieces)] for i in range(len(pieces))]
    texts += ["".join(order[i : i + PROBED]) for i in range(0, len(order), PROBED)]
    special = {name: getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "unk")}
    return store.digest([vocabulary, sorted(tokenizer.all_special_ids), special, tokenizer(texts).input_ids])


def hub_snapshot(name: str) -> Path:
    """Return the directory of a model that is given by its path or by its id on the hub."""
    if Path(name).is_dir():
        return Path(name)
    if name.count("/") != 1 or name.startswith((".", "/")):
        raise UserError(f"model directory {name} does not exist")
    from huggingface_hub import snapshot_download

    try:
        with show_activity(f"{name}: downloading"):
            return Path(snapshot_download(name, ignore_patterns=["*.msgpack", "*.h5", "*.onnx", "*.gguf"]))
    except Exception as error:  # hub errors come in many kinds; all mean that it cannot be had
        raise UserError(
            f"{name} is neither a directory nor a model that the hub gives ({type(error).__name__})"
        ) from None


def quiet_libraries() -> None:
    """Turn off bars and notices of libraries, imported already or not; this project's warnings remain."""
    off = {"TRANSFORMERS_VERBOSITY": "error", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
    on_terminal = sys.stderr.isatty()  # there its bar shows how loading proceeds
    for name, value in (off | ({} if on_terminal else {"HF_HUB_DISABLE_PROGRESS_BARS": "1"})).items():
        os.environ.setdefault(name, value)
    if transformers := sys.modules.get("transformers"):
        transformers.logging.set_verbosity_error()
        if not on_terminal:
            transformers.logging.disable_progress_bar()
    if datasets := sys.modules.get("datasets"):
        datasets.disable_progress_bars()
    for noisy in ("sentence_transformers", "huggingface_hub", "urllib3", "httpx"):  # retries, above all
        logging.getLogger(noisy).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)
