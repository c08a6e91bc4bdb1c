"""Loading a causal language model strictly: what its files hold is what it has, and nothing else is.

transformers is shown no file of a directory but those of `opened_files`, so that list is what a result's key
covers. Somebody else may have made the files. Code among them is not run, and there is no switch for it;
pickles (`.bin`) are read as tensors and plain values, by torch's `weights_only`; no name or link in them
leads to a file elsewhere.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import re
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from common.errors import UserError, one_line
from common.untrusted import JSON_BYTES, is_plain_name, links_outside, read_json

FILES = ("model.safetensors", "pytorch_model.bin")  # the first that is there counts; each may be in shards
CONFIG, GENERATION, ADAPTER = "config.json", "generation_config.json", "adapter_config.json"
# Of an adapter in the directory of a model, the one file that transformers reads.
ADAPTER_FILES = ("adapter_model.safetensors",)
MOST_LAYERS = 10_000
# What transformers reads of a directory besides, and the bytes that it may have at most.
SETTINGS = dict.fromkeys(
    (
        CONFIG,
        GENERATION,
        ADAPTER,
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
    ),
    JSON_BYTES,
) | {"tokenizer.json": 256 << 20, "vocab.json": 256 << 20}
# Masks that old checkpoints carry as tensors and that models now make themselves.
OLD_BUFFERS = re.compile(r"(attn|attention)\.(masked_)?bias$")


class Loaded(NamedTuple):
    """A model and what is wrong with its files; nothing is when no list has a name and `fault` is None."""

    model: Any
    missing: list[str]  # tensors that no file holds
    mismatched: list[str]  # tensors that a file holds in another shape
    unexpected: list[str]  # tensors that this kind of model has not
    fault: str | None  # what else; the sentence begins with a verb: "holds ..."

    @property
    def faulty(self) -> bool:
        """Return whether anything is wrong with the files."""
        return bool(self.missing or self.mismatched or self.unexpected or self.fault)


def load_config(source: str | Path, revision: str | None = None) -> Any:
    """The configuration of the model in a directory or of the hub.

    Raises UserError for what `check_directory` refuses and for a model that needs code of its own, OSError
    when it is not there, and ValueError for one that cannot be.
    """
    from transformers import AutoConfig

    check_directory(source)
    try:
        with without_code(source):
            config = AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=False)
        layers = getattr(config.get_text_config(), "num_hidden_layers", 0)
    except (UserError, OSError, ValueError):
        raise
    except Exception as error:  # whatever a configuration makes of transformers that is damaged or made up
        raise ValueError(f"config.json: {type(error).__name__}: {one_line(error, 160)}") from None
    if not isinstance(layers, int) or layers > MOST_LAYERS:
        raise ValueError(f"config.json: num_hidden_layers is {one_line(repr(layers), 40)}")
    return config


def opened_files(directory: Path) -> list[Path]:
    """Return the files of a local checkpoint that decide what `load_causal_lm` gives.

    These are its configurations, its weights and the adapter among them, if there is one. Raises UserError
    when weights are missing.
    """
    paths = [directory / name for name in (CONFIG, GENERATION) if (directory / name).is_file()]
    for name in FILES:
        index = directory / f"{name}.index.json"
        if (directory / name).is_file():
            weights = [directory / name]
        elif index.is_file():
            weights = [
                directory / shard for shard in sorted(set(shard_names(index, read_json(index)).values()))
            ]
            paths.append(index)
        else:
            continue
        break
    else:
        raise UserError(f"{directory} has no weights ({' or '.join(FILES)}, or its index)", code="no-weights")
    if (directory / ADAPTER).is_file():
        adapters = [directory / name for name in ADAPTER_FILES if (directory / name).is_file()]
        if not adapters:
            raise UserError(
                f"{directory} has {ADAPTER} but no {' or '.join(ADAPTER_FILES)}; complete or remove it",
                code="no-weights",
            )
        weights += adapters[:1]
        paths.append(directory / ADAPTER)
    missing = next((path for path in weights if not path.is_file()), None)
    if missing is not None:
        raise UserError(f"{missing} is missing; the checkpoint is not whole", code="no-weights")
    return paths + weights


@contextlib.contextmanager
def shown(files: Iterable[Path]) -> Iterator[Path]:
    """Yield a directory that shows a library these files, and none that it might find beside them."""
    with tempfile.TemporaryDirectory(prefix="emo-model-") as directory:
        for file in files:
            (Path(directory) / file.name).symlink_to(file.resolve())
        yield Path(directory)


def load_causal_lm(source: str | Path, revision: str | None = None, **options: Any) -> Loaded:
    """Return the model in a directory or of the hub; `options` go to `from_pretrained`.

    transformers fills in what is missing and only warns: the callers refuse instead. An adapter in the
    directory is applied to the weights beside it, which must be whole without it. Raises UserError for what
    `check_directory` refuses and for a model that needs code of its own, and whatever transformers makes of
    files that it cannot read.
    """
    check_directory(source)
    if not Path(source).is_dir():
        return _load(source, source, revision, **options)
    load_config(source)  # refuses what needs code of its own
    files = opened_files(Path(source))
    adapter = [file for file in files if file.name in (ADAPTER, *ADAPTER_FILES)]
    with shown(file for file in files if file not in adapter) as base:
        loaded = _load(base, source, None, **options)
    loaded.model.config._name_or_path = str(source)
    if adapter and not loaded.faulty:
        with shown(adapter) as directory:
            return _with_adapter(loaded.model, directory, source)
    return loaded


def _load(directory: str | Path, source: str | Path, revision: str | None, **options: Any) -> Loaded:
    """Return the model in a directory or of the hub, which messages call `source`."""
    from transformers import AutoModelForCausalLM

    load: Any = AutoModelForCausalLM.from_pretrained
    options |= {"ignore_mismatched_sizes": True, "trust_remote_code": False}
    try:
        with _without_report(), without_code(source):
            model, report = load(directory, revision=revision, output_loading_info=True, **options)
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL (\S+)", str(error))
        what = named[1] if named else one_line(error, 80)
        raise UserError(
            f"{source}: its weights are a pickle that is more than tensors ({what}), which is not loaded; "
            "use safetensors"
        ) from None
    loaded = _loaded(model, report)
    if not loaded.faulty:
        loaded = loaded._replace(fault=_silent_fault(model, _files(directory, revision)))
    return loaded


def _with_adapter(model: Any, directory: Path, source: str | Path) -> Loaded:
    """Return a model with the adapter in a directory, for which tensors of either are missing or too many."""
    try:
        with _without_report():
            report = model.load_adapter(str(directory), adapter_kwargs={"local_files_only": True})
    except (ImportError, TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"{source}: its adapter cannot be applied ({one_line(error, 160)}); merge it into the "
            f"weights, or remove {ADAPTER}",
            code="adapter",
        ) from None
    return _loaded(model, report.to_dict())


def _loaded(model: Any, report: dict[str, Any]) -> Loaded:
    """Return a model with what transformers reports of its files."""
    missing, mismatched, unexpected = (
        sorted(name if isinstance(name, str) else str(name[0]) for name in report[f"{kind}_keys"])
        for kind in ("missing", "mismatched", "unexpected")
    )
    unexpected = [name for name in unexpected if not OLD_BUFFERS.search(name)]
    return Loaded(model, missing, mismatched, unexpected, None)


def check_directory(source: str | Path) -> None:
    """Refuse a local checkpoint whose files lead elsewhere or cannot be read; of a hub id nothing is known.

    Raises UserError.
    """
    directory = Path(source)
    if not directory.is_dir():
        return
    led = next(links_outside(directory), None)
    if led is not None:
        raise UserError(
            f"{led} is a link to {led.resolve()}, outside the model's directory; put the file there"
        )
    limits = SETTINGS | {path.name: JSON_BYTES for path in directory.glob("*.index.json")}
    for name, limit in limits.items():
        path = directory / name
        try:
            tree = read_json(path, limit) if path.exists() else {}
        except (OSError, ValueError) as error:
            raise UserError(f"{path} cannot be read: {one_line(error, 120)}") from None
        if name.endswith(".index.json"):
            shard_names(path, tree)
        elif not isinstance(tree, dict):
            raise UserError(f"{path} must hold a JSON object")


def shard_names(index: Path, tree: Any) -> dict[str, str]:
    """Tensor -> file of a checkpoint's index, whose content is `tree`.

    Raises UserError when it is none, or names a file that is not beside it.
    """
    names = tree.get("weight_map") if isinstance(tree, dict) else None
    if not isinstance(names, dict) or not all(is_plain_name(name) for name in names.values()):
        raise UserError(f"{index} is damaged: weight_map must give each tensor the name of a file beside it")
    return names


@contextlib.contextmanager
def without_code(source: str | Path) -> Iterator[None]:
    """Around loads with `trust_remote_code=False`: what transformers says of it becomes a UserError."""
    try:
        yield
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise UserError(
            f"{source} needs Python code of its own (auto_map in config.json), which is never run here; use "
            "a checkpoint of a family that transformers has"
        ) from None


@contextlib.contextmanager
def _without_report() -> Iterator[None]:
    """Silence transformers' table of what a checkpoint lacks, which is told in one line afterwards.

    Faults of its own conversions stay: their error refers to the table.
    """

    def keep(record: logging.LogRecord) -> bool:
        message = record.getMessage()
        return "CONVERSION" in message or not ("LOAD REPORT" in message or "tied weights" in message)

    loggers = [logging.getLogger(f"transformers.{name}") for name in ("modeling_utils", "integrations.peft")]
    for logger in loggers:
        logger.addFilter(keep)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(keep)


def _silent_fault(model: Any, files: list[Path]) -> str | None:
    """What transformers passes over: integers become weights, and of two unlike tied tensors one wins."""
    from transformers.modeling_utils import load_state_dict

    where: dict[str, Path] = {}
    quantized = getattr(model, "hf_quantizer", None) is not None  # its whole numbers are as they should be
    for file in files:
        for name, tensor in load_state_dict(file, map_location="meta").items():
            where[name] = file
            if not (quantized or tensor.is_floating_point() or _is_buffer(model, name)):
                kind = str(tensor.dtype).removeprefix("torch.")
                return f"holds {name} as {kind}, not as floating-point numbers"
    for one, other in model.get_expanded_tied_weights_keys(all_submodels=True).items():
        names = [_name_in(where, model, name) for name in (one, other)]
        if None in names or names[0] == names[1]:
            continue
        first, second = (load_state_dict(where[name])[name].to(model.dtype) for name in names if name)
        if not first.equal(second):
            return (
                f"holds {names[0]} and {names[1]} with different values, but its config.json says that "
                "they are one (tie_word_embeddings)"
            )
    return None


def _is_buffer(model: Any, name: str) -> bool:
    """Whether a tensor in a file is, or once was, something that the model computes itself."""
    last = name.rpartition(".")[2]
    ignored = model._keys_to_ignore_on_load_unexpected or ()
    return (
        OLD_BUFFERS.search(name) is not None
        or any(re.search(pattern, name) for pattern in ignored)
        or any(buffer.rpartition(".")[2] == last for buffer, _ in model.named_buffers())
    )


def _name_in(held: dict[str, Path], model: Any, name: str) -> str | None:
    """What files call the tensor `name`: checkpoints of a bare base model lack the prefix."""
    names = (name, name.removeprefix(f"{model.base_model_prefix}."))
    return next((found for found in names if found in held), None)


def _files(source: str | Path, revision: str | None) -> list[Path]:
    """The weight files that transformers has loaded; none where they have other names."""
    for name in FILES:
        whole, index = (_file(source, revision, found) for found in (name, f"{name}.index.json"))
        if whole is not None:
            return [whole]
        if index is not None:
            shards = sorted(set(shard_names(index, read_json(index)).values()))
            return [file for shard in shards if (file := _file(source, revision, shard)) is not None]
    return []


def _file(source: str | Path, revision: str | None, name: str) -> Path | None:
    """A file of a local or hub checkpoint; None if none of that name is here, where what was loaded is."""
    from transformers.utils import cached_file

    found = cached_file(
        source,
        name,
        revision=revision,
        local_files_only=True,
        _raise_exceptions_for_missing_entries=False,
    )
    return Path(found) if found else None
