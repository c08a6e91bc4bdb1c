"""Strict loading of causal language models: all tensors come from the files, and none is left over.

transformers sees only the files of `opened_files`, which therefore identify a local model. Code next to the
weights is never run. Pickles (`.bin`) are read with torch's `weights_only`.
"""

from __future__ import annotations

import contextlib
import pickle
import re
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..context_length import DYNAMIC
from ..errors import UserError, one_line
from .untrusted import is_plain_name, read_json

FILES = ("model.safetensors", "pytorch_model.bin")  # the first that exists is used; each may be sharded
CONFIG = "config.json"
GENERATION = "generation_config.json"
ADAPTER = "adapter_config.json"
ADAPTER_FILE = "adapter_model.safetensors"  # the adapter file that transformers reads next to a model
NESTED = "adapter"  # folder of the adapter in an export that also has the merged model
# Attention masks in old checkpoints, which models now compute.
OLD_BUFFERS = re.compile(r"(attn|attention)\.(masked_)?bias$")
# Parts of each file of weights that `sampled_digest` reads, and bytes of a part.
BLOCKS = 1024
BLOCK_BYTES = 1 << 14


class Loaded(NamedTuple):
    """A model, and the faults of its files."""

    model: Any
    missing: list[str]  # tensors that no file has
    mismatched: list[str]  # tensors with another shape in the file
    unexpected: list[str]  # tensors in the files that the model does not have
    fault: str | None  # another fault, as a sentence that begins with a verb: "holds ..."

    @staticmethod
    def of(model: Any, report: Mapping[str, Iterable[Any]]) -> Loaded:
        """Combine a model with transformers' report on its files."""
        missing, mismatched, unexpected = (
            sorted(name if isinstance(name, str) else str(name[0]) for name in report[f"{kind}_keys"])
            for kind in ("missing", "mismatched", "unexpected")
        )
        unexpected = [name for name in unexpected if not OLD_BUFFERS.search(name)]
        return Loaded(model, missing, mismatched, unexpected, None)

    @property
    def faulty(self) -> bool:
        """Return whether the files have any fault."""
        return bool(self.missing or self.mismatched or self.unexpected or self.fault)


def load_model_config(source: str | Path, revision: str | None = None) -> Any:
    """Load the configuration of a model in a directory or on the Hub.

    Raises UserError if the model needs custom code, OSError if it does not exist, and ValueError if its
    configuration is invalid.
    """
    from transformers import AutoConfig

    reject_adapter(Path(source))
    try:
        return AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=False)
    except (OSError, ValueError) as error:
        _reject_custom_code(error, source)
        raise
    except Exception as error:  # invalid configurations raise errors of any type in transformers
        raise ValueError(f"config.json: {type(error).__name__}: {one_line(error, 160)}") from None


def has_only_adapter(directory: Path) -> bool:
    """Return whether a directory has an adapter without its base model."""
    return (directory / ADAPTER).is_file() and not (directory / CONFIG).is_file()


def base_of_adapter(directory: Path) -> tuple[str, str | None]:
    """Return the base model that an adapter names, and its commit. Raises UserError if it names none."""
    tree: Any = None
    with contextlib.suppress(OSError, ValueError):
        tree = read_json(directory / ADAPTER)
    base = tree.get("base_model_name_or_path") if isinstance(tree, dict) else None
    if not isinstance(base, str) or not base:
        problem = f"{directory / ADAPTER} does not name its base model"
        raise UserError(f"{problem}. Set base_model_name_or_path in it", code="adapter")
    return base, tree.get("revision")


def reject_adapter(directory: Path) -> None:
    """Raise UserError for a directory that has an adapter without its base model."""
    if has_only_adapter(directory):
        base, _ = base_of_adapter(directory)
        fix = f"set model.path={base} and model.lora.path={directory} to continue it"
        raise UserError(f"{directory} has an adapter (LoRA), not a model; {fix}", code="adapter")


def downloaded_directory(name: str, revision: str | None) -> Path:
    """Return the directory of a Hub model that is on this machine. Raises UserError if it is not."""
    file = find_model_file(name, revision, CONFIG)
    if file is None:
        problem = f"the base model {name} of the adapter is neither a directory nor downloaded"
        raise UserError(f"{problem}. Download it first", code="adapter")
    return file.parent


def files_with_base(directory: Path, base: Path) -> list[Path]:
    """Return the files of an adapter, and those of its base model that it does not replace."""
    own = {path.name: path for path in directory.iterdir() if path.is_file()}
    return [*own.values(), *(path for path in base.iterdir() if path.is_file() and path.name not in own)]


def sampled_digest(directory: Path) -> int:
    """Return a checksum of a checkpoint's files of weights: their sizes, and BLOCKS parts of each."""
    total = 0
    for path in opened_files(directory):
        size = path.stat().st_size
        with path.open("rb") as file:
            for block in range(BLOCKS):
                file.seek(block * size // BLOCKS)
                total = zlib.crc32(file.read(min(BLOCK_BYTES, size // BLOCKS + 1)), total)
        total = zlib.crc32(str(size).encode(), total)
    return total


def opened_files(directory: Path) -> list[Path]:
    """Return the files of a local checkpoint that `load_causal_lm` reads.

    These are configurations, weights and the adapter, if there is one. Raises UserError if weights are
    missing or a configuration is invalid.
    """
    weights = _weights(directory, None)
    if not weights:
        raise UserError(
            f"{directory} has no weights (looked for {' and '.join(FILES)}, and their indexes)",
            code="no-weights",
        )
    if (directory / ADAPTER).is_file() and not (directory / ADAPTER_FILE).is_file():
        problem = f"{directory} has {ADAPTER} but no {ADAPTER_FILE}; complete or remove it"
        raise UserError(problem, code="no-weights")
    for path in (directory / name for name in (CONFIG, GENERATION, ADAPTER)):
        try:
            if path.is_file() and not isinstance(read_json(path), dict):
                raise ValueError("it must contain a JSON object")
        except (OSError, ValueError) as error:
            message = f"{path} cannot be read: {one_line(error, 120)}"
            raise UserError(message, code="model-settings") from None
    paths = [directory / CONFIG, directory / GENERATION, *weights]
    paths += [directory / ADAPTER, directory / ADAPTER_FILE] if (directory / ADAPTER).is_file() else []
    return [path for path in paths if path.is_file()]


def _weights(source: str | Path, revision: str | None) -> list[Path]:
    """Return the weight files of a model, with their index first if there is one."""
    for name in FILES:
        if (file := find_model_file(source, revision, name)) is not None:
            return [file]
        if (index := find_model_file(source, revision, f"{name}.index.json")) is not None:
            shards = sorted(set(shard_names(index).values()))
            files = [find_model_file(source, revision, shard) for shard in shards]
            if None in files:
                missing = index.parent / shards[files.index(None)]
                raise UserError(f"{missing} is missing; the checkpoint is incomplete", code="no-weights")
            return [index, *filter(None, files)]
    return []


def find_model_file(
    source: str | Path, revision: str | None, name: str, download: bool = False
) -> Path | None:
    """Return a file of a model in a directory or on the Hub, or None if it has no such file.

    Without `download`, only files that are on this machine are found.
    """
    if Path(source).is_dir():
        path = Path(source) / name
        return path if path.is_file() else None
    from transformers.utils import cached_file

    local = not download
    cached = cached_file(
        source, name, revision=revision, local_files_only=local, _raise_exceptions_for_missing_entries=False
    )
    return Path(cached) if cached else None


def _forget_earlier_batches(model: Any) -> None:
    """Make dynamic RoPE independent of earlier batches, so that order and resuming do not matter."""

    def forget(module: Any, _: Any) -> None:
        for prefix in prefixes(module):
            device = getattr(module, f"{prefix}inv_freq").device
            original = getattr(module, f"{prefix}original_inv_freq")
            setattr(module, f"{prefix}inv_freq", original.to(device, copy=True))
            setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)

    def prefixes(module: Any) -> list[str]:
        """Return the beginnings of the names of the dynamic state. RoPE by layer type has several."""
        kind = getattr(module, "rope_type", None)
        kinds = {f"{layer}_": name for layer, name in kind.items()} if isinstance(kind, dict) else {"": kind}
        return [prefix for prefix, name in kinds.items() if name == DYNAMIC]

    for module in model.modules():
        if prefixes(module):
            module.register_forward_pre_hook(forget)


@contextlib.contextmanager
def linked_directory(files: Iterable[Path]) -> Iterator[Path]:
    """Yield a directory with links to these files only, so that libraries read no others."""
    with tempfile.TemporaryDirectory(prefix="emo-model-") as directory:
        for file in files:
            (Path(directory) / file.name).symlink_to(file.resolve())
        yield Path(directory)


def load_causal_lm(source: str | Path, revision: str | None = None, **options: Any) -> Loaded:
    """Load the model in a directory or on the Hub; `options` go to `from_pretrained`.

    transformers initialises missing tensors and only warns, so callers must check `Loaded.faulty`. An adapter
    in the directory is applied to the weights next to it. Raises UserError like `opened_files`, or if the
    model needs custom code; other errors of transformers are passed on.
    """
    if not Path(source).is_dir():
        return _load(source, source, revision, **options)
    load_model_config(source)  # rejects custom code
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
            problem = f"{source}: the adapter cannot be applied ({one_line(error, 160)})"
            fix = f"merge it into the weights, or remove {ADAPTER}"
            raise UserError(f"{problem}; {fix}", code="adapter") from None
        return Loaded.of(loaded.model, report.to_dict())
    return loaded


def _load(directory: str | Path, source: str | Path, revision: str | None, **options: Any) -> Loaded:
    """Load a model from a directory or the Hub. Messages name it `source`."""
    from transformers import AutoModelForCausalLM

    load: Any = AutoModelForCausalLM.from_pretrained
    options |= {"ignore_mismatched_sizes": True, "trust_remote_code": False}
    try:
        with _without_report():
            model, report = load(directory, revision=revision, output_loading_info=True, **options)
    except ValueError as error:
        _reject_custom_code(error, source)
        raise
    except pickle.UnpicklingError as error:
        problem = f"{source}: the weights are a pickle with more than tensors ({one_line(error, 120)})"
        raise UserError(f"{problem} and are not loaded; use safetensors", code="pickle") from None
    loaded = Loaded.of(model, report)
    _forget_earlier_batches(model)
    if loaded.faulty:
        return loaded
    # transformers removes this key from the model's configuration if it dequantizes the weights.
    quantized = getattr(load_model_config(directory, revision), "quantization_config", None) is not None
    return loaded._replace(fault=_find_silent_fault(model, _weights(directory, revision), quantized))


def shard_names(index: Path) -> dict[str, str]:
    """Read a checkpoint's index: file name by tensor. Raises UserError if the index is invalid."""
    tree = None
    with contextlib.suppress(OSError, ValueError):
        tree = read_json(index)
    names = tree.get("weight_map") if isinstance(tree, dict) else None
    if not isinstance(names, dict) or not all(is_plain_name(name) for name in names.values()):
        message = f"{index} is damaged: weight_map must map each tensor to a file in the same directory"
        raise UserError(message, code="model-index")
    return names


def _reject_custom_code(error: Exception, source: str | Path) -> None:
    """Raise UserError if loading failed because the model needs custom code."""
    if "trust_remote_code" in str(error):
        problem = f"{source} needs custom Python code (auto_map in config.json), which is never run"
        raise UserError(f"{problem}; use a model that transformers supports", code="remote-code") from None


@contextlib.contextmanager
def _without_report() -> Iterator[None]:
    """Silence transformers' table of missing tensors, which callers report in one line."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)


def _find_silent_fault(model: Any, paths: list[Path], quantized: bool) -> str | None:
    """Return a fault that transformers ignores: integer weights, or tied tensors that differ.

    quantized: Whether the configuration describes a quantization, for which integers are correct.
    """
    from transformers.modeling_utils import load_state_dict

    files: dict[str, Path] = {}  # by tensor
    buffers = {name.rpartition(".")[2] for name, _ in model.named_buffers()}
    ignored = [OLD_BUFFERS, *map(re.compile, model._keys_to_ignore_on_load_unexpected or ())]
    for path in (path for path in paths if path.suffix != ".json"):
        for name, tensor in load_state_dict(path, map_location="meta").items():
            files[name] = path
            is_buffer = name.rpartition(".")[2] in buffers or any(rule.search(name) for rule in ignored)
            if not (quantized or tensor.is_floating_point() or is_buffer):
                kind = str(tensor.dtype).removeprefix("torch.")
                return f"holds {name} as {kind}, not as floating-point numbers"
    return _find_untied_tensors(model, files)


def _find_untied_tensors(model: Any, files: dict[str, Path]) -> str | None:
    """Return a fault if tied tensors have different values in their files. files: path by tensor."""
    from transformers.modeling_utils import load_state_dict

    prefix = f"{model.base_model_prefix}."  # missing in the files of a bare base model
    for pair in model.get_expanded_tied_weights_keys(all_submodels=True).items():
        names = [key if key in files else key.removeprefix(prefix) for key in pair]
        if names[0] == names[1] or not all(name in files for name in names):
            continue
        first, second = (load_state_dict(files[name])[name].to(model.dtype) for name in names)
        if not first.equal(second):
            problem = f"holds {names[0]} and {names[1]} with different values"
            return f"{problem}, but config.json ties them (tie_word_embeddings)"
    return None
