"""Hugging Face models under evaluation. The weights are loaded only when something has to be computed.

Importing this module and asking about files loads neither torch nor transformers.
"""

from __future__ import annotations

import copy
import logging
import os
import re
import sys
import tempfile
import uuid
import warnings
from collections.abc import Sequence
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from emo.common.cli.commands import announce
from emo.common.cli.progress import show_activity
from emo.common.context_length import context_length
from emo.common.errors import UserError, one_line
from emo.common.io.files import sha256
from emo.common.io.hub import hub_directory
from emo.common.io.untrusted import read_json
from emo.common.io.weights import (
    ADAPTER,
    GENERATION,
    Loaded,
    base_of_adapter,
    files_with_base,
    has_only_adapter,
    load_causal_lm,
    load_model_config,
    opened_files,
)
from emo.common.io.weights import CONFIG as CONFIG_JSON
from emo.data_prep.encoding import tokenizer as loader
from emo.data_prep.encoding.chat_templates import read_template
from emo.data_prep.encoding.chats import ChatEncoder
from emo.data_prep.encoding.tokenizer import CHAT_TEMPLATE, PROBES, load_tokenizer, save_tokenizer
from emo.data_prep.encoding.tokenizer import FILES as TOKENIZER_FILES
from emo.pipeline.control.run_dir import EXPORT, EXPORT_INFO, HF, read_export_info

from ..results import store
from .base import Advance, Item, ItemScore, LanguageModel, NotFiniteError, Say

if TYPE_CHECKING:
    from .prefix_scorer import PrefixScorer

DTYPES = ("auto", "float32", "bfloat16", "float16")
TOKENIZER_VERSION = 1  # of what `tokenizer_content` covers
PIECES_PER_TEXT = 4096  # vocabulary pieces in each text that `tokenizer_content` encodes
# Results, figures and options such as NAME=DIR and NAME,NAME use names unescaped.
NAME = re.compile(r"[^\W_][\w.+@~ -]{0,199}")


class EvaluatedModel(LanguageModel):
    """A Hugging Face model directory (an export of `pipeline`, or any other) or hub id.

    dtype: of the computation. `auto` takes the dtype that the configuration names, if it names one.
    """

    source: str = ""

    def __init__(self, path: str, name: str | None = None, dtype: str = "auto") -> None:
        if dtype not in DTYPES:
            raise UserError(
                f"--dtype {dtype!r} is not known. Choose one of {', '.join(DTYPES)}.", code="option-value"
            )
        if name is not None and (not NAME.fullmatch(name) or name != name.strip()):
            raise UserError(
                f"--name {name!r} must begin with a letter or digit and contain only letters, digits, spaces "
                "and . _ - + @ ~",
                code="option-value",
            )
        self.path = with_base(hub_snapshot(path))
        self.source = path
        self.name = name or default_name(Path(path))
        if not (self.path / CONFIG_JSON).is_file():
            export = self.path / EXPORT
            hint = f". Use the run's export, {export}" if (export / CONFIG_JSON).is_file() else ""
            raise UserError(
                f"{self.path} is not a model directory: config.json is missing{hint}", code="no-model"
            )
        opened_files(self.path)  # raises for a directory without weights or settings
        self.dtype = dtype
        if dtype == "auto":  # stays `auto` if transformers has to look at the weights
            config = read_json(self.path / CONFIG_JSON)
            stored = str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch.")
            self.dtype = stored if stored in DTYPES else "auto"

    @property
    def digest(self) -> str:
        """Identity of weights, adapter and configuration: the content of all files that loading opens."""
        return self._digests[0]

    @property
    def generation_digest(self) -> str:
        """Identity of the generation settings, which affect sampled text only."""
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
        """Whether an adapter is applied to the weights."""
        return (self.path / ADAPTER).is_file()

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer, which adds BOS and EOS as data preparation does.

        Raises UserError when it is not the one that `tokenizer_digest` identifies.
        """
        tokenizer: Any = load_tokenizer(self.path)
        if "tokenizer_digest" in self.__dict__ and tokenizer_content(tokenizer) != self.tokenizer_digest:
            raise self._changed("tokenizer")
        return tokenizer

    @cached_property
    def tokenizer_digest(self) -> str:
        """Identity of the tokenizer by content (`tokenizer_content`), cached for these very files."""

        def compute() -> str:
            content = tokenizer_content(self.tokenizer)
            if store.digest_files(self.path, self._tokenizer_files()) != files:
                raise self._changed("tokenizer")
            return content

        files = store.digest_files(self.path, self._tokenizer_files())
        code = [
            TOKENIZER_VERSION,
            version("tokenizers"),
            version("transformers"),
            sha256(Path(str(loader.__file__))),
        ]
        return store.cached_digest("tokenizers", store.digest_json([code, files]), compute)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each text, never truncated."""
        encoded = self.tokenizer(list(texts), truncation=False, padding=False, verbose=False)
        ids: list[list[int]] = encoded["input_ids"]
        return ids

    def fresh_tokenizer(self) -> Any:
        """Return a copy of the tokenizer, for callers that change its padding."""
        return copy.deepcopy(self.tokenizer)

    def _tokenizer_files(self) -> list[Path]:
        names = [*TOKENIZER_FILES, CHAT_TEMPLATE]
        return [self.path / name for name in names if (self.path / name).is_file()]

    def files(self) -> list[Path]:
        """Return all files of the model that the digests cover."""
        return [*opened_files(self.path), *self._tokenizer_files()]

    def _changed(self, part: str) -> UserError:
        return UserError(
            f"{self.source}: its {part} changed during the evaluation. Nothing is stored. Run it again.",
            code="changed",
        )

    @cached_property
    def model(self) -> Any:
        """The model in evaluation mode, on this process's GPU if there is one.

        Raises UserError unless the files match `digest` and contain exactly the weights of a causal language
        model, all weights are finite, and the tokenizer fits the model.
        """
        announce(self.name, "weights")
        _ = self._digests  # of the files before they are loaded
        with show_activity(f"{self.name}: loading weights"):
            return self._load()

    def _load(self) -> Any:
        import torch

        try:
            loaded = load_causal_lm(self.path, dtype=self.dtype)
        except (UserError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # transformers may raise anything for a damaged file
            reason = f"{type(error).__name__}: {one_line(error, 200)}"
            raise UserError(f"cannot load {self.source}: {reason}", code="model") from None
        self.require_unchanged()
        model = loaded.model.eval()
        fault = self._fault_of_files(loaded)
        if fault is None:
            if torch.cuda.is_available():
                rank = int(os.environ.get("LOCAL_RANK", "0"))
                model = model.to(torch.device("cuda", rank % torch.cuda.device_count()))
            fault = self._fault_of_scores(model)
        if fault is not None:
            raise UserError(f"{self.source} {fault}", code="model")
        return model

    def require_unchanged(self) -> None:
        """Raise UserError when the files no longer match `digest` and `generation_digest`."""
        expected = self._digests
        try:
            current = self._current_digests()
        except (OSError, UserError):
            raise self._changed("files") from None
        if current != expected:
            raise self._changed("files")

    def _fault_of_files(self, loaded: Loaded) -> str | None:
        """Return why the loaded weights cannot be evaluated with this tokenizer, or None."""
        for kind in ("missing", "unexpected", "mismatched"):  # random weights, or another model's
            if names := getattr(loaded, kind):
                others = f" and {len(names) - 1} more" if len(names) > 1 else ""
                return f"does not hold the weights of its causal language model: {names[0]}{others} {kind}"
        if loaded.fault is not None:
            return loaded.fault
        for name, weights in loaded.model.named_parameters():
            if not bool(weights.isfinite().all()):
                return f"has NaN or infinite weights in {name}"
        # Every piece needs an embedding, except added special tokens that never occur in text.
        embeddings = loaded.model.get_input_embeddings().weight.shape[0]
        special = set(self.tokenizer.all_special_tokens)
        if any(i >= embeddings and p not in special for p, i in self.tokenizer.get_vocab().items()):
            return (
                f"has {embeddings} embeddings, but its tokenizer has {len(self.tokenizer)} pieces. The "
                "tokenizer belongs to another model"
            )
        return None

    @staticmethod
    def _fault_of_scores(model: Any) -> str | None:
        """Return why the outputs of `model` cannot score text, or None."""
        from .prefix_scorer import is_causal

        try:
            if is_causal(model):
                return None
        except NotFiniteError as error:
            return f"cannot be scored: {error}. Try --dtype float32"
        return f"is a {type(model).__name__}, in which later tokens change the scores of earlier ones"

    @property
    def computed_dtype(self) -> str:
        """The dtype of the loaded weights, also when `dtype` is `auto`."""
        return str(self.model.dtype).removeprefix("torch.")

    @cached_property
    def scorer(self) -> PrefixScorer:
        """The model's scorer, which picks the fastest method that agrees with the model's own forward."""
        from .prefix_scorer import PrefixScorer

        return PrefixScorer(self.model)

    def prepare(self, budget: int, say: Say) -> None:
        """Load the weights and the scorer. budget: tokens per batch, padding included."""
        from .prefix_scorer import PrefixScorer

        self.scorer = PrefixScorer(self.model, budget, say)

    def score(
        self, items: Sequence[Item], *, ignored: int | None = None, advance: Advance = lambda count: None
    ) -> list[ItemScore]:
        """Return the scores of the items, as LanguageModel.score does."""
        return self.scorer.score(items, ignored, advance)

    @cached_property
    def chat_encoder(self) -> ChatEncoder:
        """The encoder of chats with the tokenizer's own template, as in training.

        The template receives the variables that export.json names, and the same date every day.
        """
        variables = self.facts.get("template_variables") or {}
        with tempfile.TemporaryDirectory() as name:  # in the format that training reads
            saved = Path(name)
            save_tokenizer(self.path, None, saved)
            return ChatEncoder(saved, read_template(saved, self.source, variables=variables))

    @cached_property
    def facts(self) -> dict[str, Any]:
        """The step, tokens and objective that the trainer recorded, if it made the export."""
        try:
            return read_export_info(self.path)
        except (OSError, ValueError) as error:
            raise UserError(
                f"{self.path / EXPORT_INFO} is unreadable: {one_line(error)}", code="damaged-file"
            ) from None

    @cached_property
    def ends(self) -> list[int]:
        """The ids that end a text, from generation_config.json, config.json and the tokenizer's EOS."""
        ids = {self.tokenizer.eos_token_id}
        for path in (self.path / GENERATION, self.path / CONFIG_JSON):
            config = read_json(path) if path.is_file() else {}
            text_config = config.get("text_config")
            for section in (config, text_config if isinstance(text_config, dict) else {}):
                value = section.get("eos_token_id")
                values = value if isinstance(value, list) else [value]
                if not all(number is None or type(number) is int for number in values):
                    problem = f"{path}: eos_token_id must be a token id or a list of them, not {value!r}"
                    raise UserError(problem, code="model-settings")
                ids |= {*values}
        return sorted(number for number in ids if number is not None and number >= 0)

    @cached_property
    def context(self) -> int | None:
        """The length in tokens of the longest sequence the model reads, or None for no configured limit."""
        try:
            return context_length(load_model_config(self.path))
        except (OSError, ValueError) as error:
            raise UserError(f"cannot load {self.source}: {one_line(error, 200)}", code="model") from None


def default_name(path: Path) -> str:
    """Return a model's name in results: the run's name for runs/emo/export or runs/emo/step-000100/hf.

    Characters that names cannot contain become `-`.
    """
    parts = path.resolve().parts
    if parts[-1] == EXPORT and len(parts) > 1:
        return clean_name(parts[-2])
    return clean_name(f"{parts[-3]}-{parts[-2]}" if parts[-1] == HF and len(parts) > 2 else parts[-1])


def clean_name(text: str) -> str:
    """Return a valid model name that resembles `text`."""
    name = re.sub(r"[^\w.+@~ -]", "-", text)[:200]
    return re.sub(r"^[\W_]+|\s+$", "", name) or "model"


def tokenizer_content(tokenizer: Any) -> str:
    """Return a digest of a tokenizer's behaviour, which does not depend on the format of its files.

    It covers the vocabulary, the special tokens and the ids of texts that concatenate all pieces in a
    shuffled order. Those ids reveal merges, text normalisation and added tokens.
    """
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    pieces = [tokenizer.convert_tokens_to_string([piece]) for piece, _ in vocabulary]
    texts = ["", "a", " a", "\n\na  b", *PROBES]
    step = 7919 if len(pieces) % 7919 else 7907  # a prime that does not divide the number of pieces
    order = [pieces[i * step % len(pieces)] for i in range(len(pieces))]
    texts += ["".join(order[i : i + PIECES_PER_TEXT]) for i in range(0, len(order), PIECES_PER_TEXT)]
    special = {name: getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "unk")}
    ids = tokenizer(texts).input_ids
    return store.digest_json([vocabulary, sorted(tokenizer.all_special_ids), special, ids])


def hub_snapshot(name: str, revision: str | None = None) -> Path:
    """Return the directory of a model from its path or its hub id, downloading it if necessary."""
    if Path(name).is_dir():
        return Path(name)
    if name.count("/") != 1 or name.startswith((".", "/")):
        raise UserError(f"model directory {name} does not exist", code="no-model")
    skipped = ["*.msgpack", "*.h5", "*.onnx", "*.gguf"]
    with show_activity(f"{name}: downloading"):
        return hub_directory(name, revision, "", code="hub", ignore_patterns=skipped)


def with_base(directory: Path) -> Path:
    """Return a directory with an adapter and its base model, made of links, or other models unchanged."""
    if not has_only_adapter(directory):
        return directory
    name, revision = base_of_adapter(directory)
    base = hub_snapshot(name, revision)
    key = store.digest_json([str(directory.resolve()), str(base.resolve())])
    target = store.cache_directory() / "adapters" / key
    files = files_with_base(directory, base)
    target.mkdir(parents=True, exist_ok=True)
    for path in {*target.iterdir()} - {target / file.name for file in files}:
        path.unlink(missing_ok=True)  # other processes may do the same
    for file in files:
        link = target / file.name
        if not link.is_symlink() or link.readlink() != file.resolve():
            part = target.with_name(f"{key}-{uuid.uuid4().hex}")
            part.symlink_to(file.resolve())
            part.replace(link)
    return target


def quiet_libraries() -> None:
    """Silence the progress bars and notices of libraries, imported already or not."""
    off = {"TRANSFORMERS_VERBOSITY": "error", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
    on_terminal = sys.stderr.isatty()  # the hub's bar shows how loading proceeds
    for name, value in (off | ({} if on_terminal else {"HF_HUB_DISABLE_PROGRESS_BARS": "1"})).items():
        os.environ.setdefault(name, value)
    if transformers := sys.modules.get("transformers"):
        transformers.logging.set_verbosity_error()
        if not on_terminal:
            transformers.logging.disable_progress_bar()
    if datasets := sys.modules.get("datasets"):
        datasets.disable_progress_bars()
    for library in ("sentence_transformers", "huggingface_hub", "urllib3", "httpx"):  # retries, above all
        logging.getLogger(library).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)
