"""Loading a causal language model strictly: every tensor of its files is used, and none is made up.

transformers is shown no file of a directory but those of `opened_files`, so that list is what a result's key
covers. Code beside the weights is not run, and there is no switch for it; pickles (`.bin`) are read as
tensors and plain values, by torch's `weights_only`.
"""

from __future__ import annotations

import contextlib
import pickle
import re
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import UserError, one_line
from .untrusted import is_plain_name, read_json

FILES = ("model.safetensors", "pytorch_model.bin")  # the first that is there counts; each may be in shards
CONFIG, GENERATION, ADAPTER = "config.json", "generation_config.json", "adapter_config.json"
ADAPTER_FILE = "adapter_model.safetensors"  # beside a model's files, the one that transformers reads
# The names that families give the longest sequence: most, GPT-2's, MPT's and DBRX's, and others.
CONTEXT_KEYS = (
    *("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "model_max_length"),
)
# Masks that old checkpoints carry as tensors and that models now make themselves.
OLD_BUFFERS = re.compile(r"(attn|attention)\.(masked_)?bias$")


class Loaded(NamedTuple):
    """A model and what is wrong with its files; nothing is when no list has a name and `fault` is None."""

    model: Any
    missing: list[str]  # tensors that no file holds
    mismatched: list[str]  # tensors that a file holds in another shape
    unexpected: list[str]  # tensors that this kind of model has not
    fault: str | None  # what else; the sentence begins with a verb: "holds ..."

    @staticmethod
    def of(model: Any, report: dict[str, Any]) -> Loaded:
        """Return a model with what transformers reports of its files."""
        missing, mismatched, unexpected = (
            sorted(name if isinstance(name, str) else str(name[0]) for name in report[f"{kind}_keys"])
            for kind in ("missing", "mismatched", "unexpected")
        )
        unexpected = [name for name in unexpected if not OLD_BUFFERS.search(name)]
        return Loaded(model, missing, mismatched, unexpected, None)

    @property
    def faulty(self) -> bool:
        """Return whether anything is wrong with the files."""
        return bool(self.missing or self.mismatched or self.unexpected or self.fault)


def load_model_config(source: str | Path, revision: str | None = None) -> Any:
    """Return the configuration of the model in a directory or of the hub.

    Raises UserError for a model that needs code of its own, OSError when it is not there, and ValueError for
    one that cannot be.
    """
    from transformers import AutoConfig

    reject_adapter(Path(source))
    try:
        return AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=False)
    except (OSError, ValueError) as error:
        _refuse_code(error, source)
        raise
    except Exception as error:  # whatever a configuration makes of transformers that is damaged or made up
        raise ValueError(f"config.json: {type(error).__name__}: {one_line(error, 160)}") from None


def reject_adapter(directory: Path) -> None:
    """Raise UserError for a directory that holds an adapter without the model that it belongs to."""
    if not (directory / ADAPTER).is_file() or (directory / CONFIG).is_file():
        return
    base = None
    with contextlib.suppress(OSError, ValueError, AttributeError):
        base = read_json(directory / ADAPTER).get("base_model_name_or_path")
    problem = f"{directory} holds an adapter (LoRA), not a model"
    cure = f"merge it into its base model {base or ''}".rstrip() + " with peft's merge_and_unload"
    raise UserError(f"{problem}: {cure} and save_pretrained, and use that directory", code="adapter")


def opened_files(directory: Path) -> list[Path]:
    """Return the files of a local checkpoint that decide what `load_causal_lm` gives.

    These are its configurations, its weights and the adapter among them, if there is one. Raises UserError
    when weights are missing, or a configuration is no JSON.
    """
    weights = _weights(directory, None)
    if not weights:
        raise UserError(f"{directory} has no weights ({' or '.join(FILES)}, or its index)", code="no-weights")
    if (directory / ADAPTER).is_file() and not (directory / ADAPTER_FILE).is_file():
        problem = f"{directory} has {ADAPTER} but no {ADAPTER_FILE}; complete or remove it"
        raise UserError(problem, code="no-weights")
    for path in (directory / name for name in (CONFIG, GENERATION, ADAPTER)):
        try:
            if path.is_file() and not isinstance(read_json(path), dict):
                raise ValueError("it must hold a JSON object")
        except (OSError, ValueError) as error:
            message = f"{path} cannot be read: {one_line(error, 120)}"
            raise UserError(message, code="model-settings") from None
    paths = [directory / CONFIG, directory / GENERATION, *weights]
    paths += [directory / ADAPTER, directory / ADAPTER_FILE] if (directory / ADAPTER).is_file() else []
    return [path for path in paths if path.is_file()]


def _weights(source: str | Path, revision: str | None) -> list[Path]:
    """Return the weight files of a model, after their index if they have one; none where there are none."""
    for name in FILES:
        whole, index = (_file(source, revision, path) for path in (name, f"{name}.index.json"))
        if whole is not None:
            return [whole]
        if index is not None:
            shards = sorted(set(shard_names(index).values()))
            files = {shard: _file(source, revision, shard) for shard in shards}
            for shard in (shard for shard, file in files.items() if file is None):
                message = f"{index.parent / shard} is missing; the checkpoint is not whole"
                raise UserError(message, code="no-weights")
            return [index, *filter(None, files.values())]
    return []


def _file(source: str | Path, revision: str | None, name: str) -> Path | None:
    """Return a file of a local checkpoint, or of one of the hub that was loaded; None where there is none."""
    if Path(source).is_dir():
        path = Path(source) / name
        return path if path.is_file() else None
    from transformers.utils import cached_file

    cached = cached_file(
        source, name, revision=revision, local_files_only=True, _raise_exceptions_for_missing_entries=False
    )
    return Path(cached) if cached else None


def context_length(config: Any) -> int | None:
    """Return the longest sequence that a model reads, in tokens, or None if its configuration has no limit.

    config: config.json as read, or the object that `load_config` returns.
    """
    tree = config if isinstance(config, dict) else config.get_text_config().to_dict()
    tree = text if isinstance(text := tree.get("text_config"), dict) else tree
    lengths = (tree.get(key) for key in CONTEXT_KEYS)
    return next((length for length in lengths if type(length) is int and length > 1), None)


@contextlib.contextmanager
def linked_directory(files: Iterable[Path]) -> Iterator[Path]:
    """Yield a directory that shows a library these files, and none that it might find beside them."""
    with tempfile.TemporaryDirectory(prefix="emo-model-") as directory:
        for file in files:
            (Path(directory) / file.name).symlink_to(file.resolve())
        yield Path(directory)


def load_causal_lm(source: str | Path, revision: str | None = None, **options: Any) -> Loaded:
    """Return the model in a directory or of the hub; `options` go to `from_pretrained`.

    transformers fills in what is missing and only warns: the callers refuse instead. An adapter in the
    directory is applied to the weights beside it, which must be whole without it. Raises UserError for what
    `opened_files` refuses and for a model that needs code of its own, and whatever transformers makes of
    files that it cannot read.
    """
    if not Path(source).is_dir():
        return _load(source, source, revision, **options)
    load_model_config(source)  # refuses what needs code of its own
    files = opened_files(Path(source))
    adapter = [file for file in files if file.name in (ADAPTER, ADAPTER_FILE)]
    with linked_directory(file for file in files if file not in adapter) as base:
        loaded = _load(base, source, None, **options)
    loaded.model.config._name_or_path = str(source)
    if adapter and not loaded.faulty:
        try:
            with linked_directory(adapter) as directory, _without_report():
                report = loaded.model.load_adapter(str(directory), adapter_kwargs={"local_files_only": True})
        except (ImportError, TypeError, ValueError, AttributeError) as error:
            problem = f"{source}: its adapter cannot be applied ({one_line(error, 160)})"
            raise UserError(
                f"{problem}; merge it into the weights, or remove {ADAPTER}", code="adapter"
            ) from None
        return Loaded.of(loaded.model, report.to_dict())
    return loaded


def _load(directory: str | Path, source: str | Path, revision: str | None, **options: Any) -> Loaded:
    """Return the model in a directory or of the hub, which messages call `source`."""
    from transformers import AutoModelForCausalLM

    load: Any = AutoModelForCausalLM.from_pretrained
    options |= {"ignore_mismatched_sizes": True, "trust_remote_code": False}
    try:
        with _without_report():
            model, report = load(directory, revision=revision, output_loading_info=True, **options)
    except ValueError as error:
        _refuse_code(error, source)
        raise
    except pickle.UnpicklingError as error:
        problem = f"{source}: its weights are a pickle that is more than tensors ({one_line(error, 120)})"
        raise UserError(f"{problem}, which is not loaded; use safetensors", code="pickle") from None
    loaded = Loaded.of(model, report)
    return (
        loaded
        if loaded.faulty
        else loaded._replace(fault=_silent_fault(model, _weights(directory, revision)))
    )


def shard_names(index: Path) -> dict[str, str]:
    """Return tensor -> file of a checkpoint's index.

    Raises UserError when it is none, or names a file that is not beside it.
    """
    tree = None
    with contextlib.suppress(OSError, ValueError):
        tree = read_json(index)
    names = tree.get("weight_map") if isinstance(tree, dict) else None
    if not isinstance(names, dict) or not all(is_plain_name(name) for name in names.values()):
        message = f"{index} is damaged: weight_map must give each tensor the name of a file beside it"
        raise UserError(message, code="model-index")
    return names


def _refuse_code(error: Exception, source: str | Path) -> None:
    """Raise UserError where loading with `trust_remote_code=False` failed for want of code."""
    if "trust_remote_code" in str(error):
        problem = f"{source} needs Python code of its own (auto_map in config.json), which is never run here"
        raise UserError(f"{problem}; use a family that transformers has", code="remote-code") from None


@contextlib.contextmanager
def _without_report() -> Iterator[None]:
    """Silence transformers' table of what a checkpoint lacks, which is told in one line afterwards."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)


def _silent_fault(model: Any, paths: list[Path]) -> str | None:
    """Return a fault that transformers passes over: whole numbers as weights, or unlike tied tensors."""
    from transformers.modeling_utils import load_state_dict

    files: dict[str, Path] = {}  # by the names of their tensors
    quantized = getattr(model, "hf_quantizer", None) is not None  # its whole numbers are as they should be
    # What the model computes itself, now or once.
    computed = {name.rpartition(".")[2] for name, _ in model.named_buffers()}
    ignored = [OLD_BUFFERS, *map(re.compile, model._keys_to_ignore_on_load_unexpected or ())]
    for path in (path for path in paths if path.suffix != ".json"):
        for name, tensor in load_state_dict(path, map_location="meta").items():
            files[name] = path
            buffer = name.rpartition(".")[2] in computed or any(rule.search(name) for rule in ignored)
            if not (quantized or tensor.is_floating_point() or buffer):
                kind = str(tensor.dtype).removeprefix("torch.")
                return f"holds {name} as {kind}, not as floating-point numbers"
    prefix = f"{model.base_model_prefix}."  # which those of a bare base model lack
    for pair in model.get_expanded_tied_weights_keys(all_submodels=True).items():
        names = [key if key in files else key.removeprefix(prefix) for key in pair]
        if names[0] == names[1] or not all(name in files for name in names):
            continue
        first, second = (load_state_dict(files[name])[name].to(model.dtype) for name in names)
        if not first.equal(second):
            return (
                f"holds {names[0]} and {names[1]} with different values, but its config.json says that "
                "they are one (tie_word_embeddings)"
            )
    return None
