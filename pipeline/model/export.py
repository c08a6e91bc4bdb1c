"""Write a trained model as Hugging Face files: safetensors shards, configuration, tokenizer and model card.

Parameters are gathered one at a time, with adapters merged into them. At the end of a run rank 0 streams them
to shards, so that no rank holds the whole model. During training `copy_model` first copies them into rank 0's
host memory, and the rest needs no other rank. Every export is loaded again and its logits are compared.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.integrations import unset_hf_deepspeed_config

from emo.common.context_length import context_length, rope_type
from emo.common.errors import ExitCode, FailureError, UserError, one_line
from emo.common.io.files import reset_modes, write_text
from emo.common.io.hub import base_of_card
from emo.common.io.untrusted import read_json
from emo.common.io.weights import CONFIG as MODEL_CONFIG
from emo.common.io.weights import (
    NESTED,
    base_of_adapter,
    downloaded_directory,
    files_with_base,
    has_only_adapter,
    linked_directory,
    load_causal_lm,
)
from emo.common.provenance import REPOSITORY
from emo.common.text import markdown, on_one_line, publishable
from emo.data_prep.config import TRAIN
from emo.data_prep.shards.format import TokenDataset, is_prepared, read_manifest

from ..config import RunConfig
from ..control.run_dir import EXPORT_INFO
from ..control.stop import die_with_parent
from ..control.world import raise_on_all_ranks
from .adapters import ADAPTER, adapter_tensors, write_adapter
from .nf4 import full_values, nf4_options, prepare_nf4
from .readers import (
    check_exported_tokenizer,
    copy_processor,
    saved_names,
    saved_tensors,
    write_config,
    write_tokenizer,
)

if TYPE_CHECKING:  # DeepSpeed takes seconds to import, and the check in a subprocess does not need it
    from ..engine.engine import Engine

SAMPLE_ROWS = 16  # rows of the data on which the tokenizer is checked
SAMPLE_TOKENS = 256  # tokens of each of these rows
PROBE_TOKENS = 16  # tokens on which logits are compared
SHARD_BYTES = 4 * 10**9
# Logits may differ by rounding. A wrong or missing tensor changes them by far more.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.15}


class ExportedTensor(NamedTuple):
    """A tensor of the exported model and the parameters that it is computed from."""

    name: str
    # The weight, then its adapters A [r, in] and B [out, r] if there are any, then DoRA's lengths [out].
    parts: tuple[nn.Parameter, ...]
    scaling: float = 1.0
    transposed: bool = False  # the weight is stored as [in, out], like GPT-2's Conv1D and embeddings

    def merged(self, weight: Tensor, *adapters: Tensor) -> Tensor:
        """Return the exported tensor, given the complete tensors of `parts`."""
        if not adapters:
            return weight
        delta = adapters[1].float() @ adapters[0].float()
        delta = self.scaling * (delta.T if self.transposed else delta)
        result = weight.float() + delta
        if len(adapters) > 2:
            inputs = 0 if self.transposed else 1
            scales = adapters[2].float() / result.norm(dim=inputs)
            result *= scales.unsqueeze(inputs)
        return result.to(weight.dtype)


class ModelCopy(NamedTuple):
    """The trained model's tensors, and logits to compare its export with."""

    model: nn.Module  # only its configuration is read, not its weights
    probe: Tensor  # token ids [1, T]
    logits: Tensor  # of the trained model for `probe`, [1, T, V]
    tensors: Iterator[tuple[str, Tensor]]  # in rank 0's host memory, each freed once it is consumed
    adapter: Iterator[tuple[str, Tensor]] = iter(())  # the same of the adapters, after `tensors`

    @property
    def base(self) -> PreTrainedModel:
        """Return the transformers model."""
        return unwrap(self.model)


def export_model(engine: Engine, config: RunConfig, target: Path, info: dict[str, object]) -> None:
    """Write the model to `target`. All ranks must call. Raises the errors of `write_export` on all ranks."""
    streamed = _stream_model(engine, config)

    def write() -> None:
        try:
            if engine.world.is_main:
                write_export(streamed, config, target, info, check_export)
        finally:  # all ranks take part in the gathers, even if rank 0 has failed
            deque(streamed.tensors, maxlen=0)
            deque(streamed.adapter, maxlen=0)

    raise_on_all_ranks(write)


def copy_model(engine: Engine, config: RunConfig) -> ModelCopy:
    """Copy the model as it is now into rank 0's host memory, in its dtype. All ranks must call."""
    streamed = _stream_model(engine, config)
    tensors = deque(streamed.tensors)
    adapter = iter(list(streamed.adapter))
    return streamed._replace(tensors=(tensors.popleft() for _ in range(len(tensors))), adapter=adapter)


def write_export(
    copied: ModelCopy,
    config: RunConfig,
    target: Path,
    info: dict[str, object],
    check: Callable[[Path, Tensor, Tensor, Tensor], None],
) -> None:
    """Write and check an export on rank 0. `target` appears only when the export is complete and correct.

    Args:
        copied: The model, whose tensors are consumed.
        config: The recipe.
        target: Directory to create or replace.
        info: Facts for export.json and the model card.
        check: `check_export` or `check_export_in_subprocess`.

    Raises FailureError if it cannot be written, UserError if it does not reproduce the logits.
    """

    def write(directory: Path) -> None:
        write_content(
            copied, config, directory, lambda folder: write_metadata(copied.base, config, folder, info)
        )

    complete_export(
        target, write, lambda directory: check(directory, copied.probe, copied.logits, sample_rows(config))
    )


def write_content(
    copied: ModelCopy, config: RunConfig, directory: Path, write_settings: Callable[[Path], object]
) -> None:
    """Write what `model.lora.export` names: the merged model, the adapter, or both."""
    content = config.model.exported
    if content != "adapter":
        write_weights(copied, directory)
        write_settings(directory)
    if content != "merged":
        folder = directory if content == "adapter" else directory / NESTED
        write_adapter(folder, copied.model, config.model, copied.adapter)
        write_settings(folder)
        (folder / MODEL_CONFIG).unlink()  # the one of the base model applies


def write_weights(copied: ModelCopy, directory: Path) -> None:
    """Write the tensors of a model, which are consumed, with the names that transformers gives them."""
    write_shards(directory, saved_tensors(copied.base, exported_names(copied.base), copied.tensors))


def complete_export(target: Path, write: Callable[[Path], None], check: Callable[[Path], object]) -> None:
    """Write an export to a new directory, and rename it to `target` once it is checked.

    Raises like `write_export`.
    """
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        write(partial)
        reset_modes(partial)
        check(partial)
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
    except (OSError, SafetensorError) as error:
        raise FailureError(
            f"cannot write {partial} ({one_line(error, 200)}). Free disk space.", code="export"
        ) from None
    except (RuntimeError, ValueError) as error:
        raise UserError(one_line(error, 400), code="export") from None


def view_model(model: nn.Module, config: RunConfig) -> ModelCopy:
    """Return a model of this process for `complete_export`. Its tensors are merged as they are consumed."""
    base = unwrap(model)
    probe = probe_tokens(base, config)
    with torch.no_grad():
        logits = model.eval()(input_ids=probe, use_cache=False).logits
    merged = ((t.name, t.merged(*map(full_values, t.parts))) for t in exported_tensors(model))
    adapter = ((name, p.detach().clone()) for name, p in adapter_tensors(model))  # files share no memory
    return ModelCopy(model, probe, logits, itertools.chain(merged, persistent_buffers(base)), adapter)


def probe_tokens(base: PreTrainedModel, config: RunConfig) -> Tensor:
    """Return token ids [1, n] to compare logits on, n <= PROBE_TOKENS: the first ones of the data.

    Without data they are spread over the vocabulary. Its first entries are often special tokens that never
    follow each other. In bfloat16, the logits of a trained model for such ids are mostly rounding errors.
    """
    rows = sample_rows(config)
    if rows.numel():
        return rows[:1, :PROBE_TOKENS]
    vocab_size = base.config.get_text_config().vocab_size
    return torch.arange(PROBE_TOKENS)[None] * max(1, vocab_size // PROBE_TOKENS) % vocab_size


def _stream_model(engine: Engine, config: RunConfig) -> ModelCopy:
    """Return the model and its logits for a few token ids. Its tensors are gathered as they are consumed."""
    content = config.model.exported
    base = unwrap(engine.model)
    probe = probe_tokens(base, config)
    engine.ds.eval()
    with torch.no_grad():
        logits = engine.ds(input_ids=probe.to(engine.world.device)).logits.cpu()
    adapters = (ExportedTensor(name, (parameter,)) for name, parameter in adapter_tensors(engine.model))
    return ModelCopy(
        engine.model,
        probe,
        logits,
        iter(()) if content == "adapter" else _gather_model(engine),
        iter(()) if content == "merged" else _gather(engine, adapters),
    )


def _gather_model(engine: Engine) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of the merged model in rank 0's host memory. All ranks must exhaust it."""
    yield from _gather(engine, exported_tensors(engine.model))
    if engine.world.is_main:
        yield from ((name, _to_host(buffer)) for name, buffer in persistent_buffers(unwrap(engine.model)))


def _to_host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def _gather(engine: Engine, tensors: Iterable[ExportedTensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors in rank 0's host memory. All ranks must exhaust it."""
    import deepspeed

    for tensor in tensors:
        partitioned = [p for p in tensor.parts if hasattr(p, "ds_id")]
        merged = None
        with deepspeed.zero.GatheredParameters(partitioned) if partitioned else contextlib.nullcontext():
            if engine.world.is_main:
                merged = _to_host(tensor.merged(*map(full_values, tensor.parts)))
        if merged is not None:
            yield tensor.name, merged


def keeps_logits(model: nn.Module) -> bool:
    """Return whether a model can compute the logits of some positions only (`logits_to_keep`)."""
    return "logits_to_keep" in getattr(unwrap(model), "argument_names", ())


def unwrap(model: nn.Module) -> PreTrainedModel:
    """Return the transformers model inside an adapter wrapper, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]


def exported_tensors(model: nn.Module) -> Iterator[ExportedTensor]:
    """Yield the tensors of the exported model, in the same order on all ranks.

    A tied head appears once, under its first name, as `from_pretrained` expects. Raises UserError for
    adapters on a layer that they cannot be merged into.
    """
    base = unwrap(model)
    for name, parameter in base.named_parameters():
        if ".lora_" in name:
            continue
        path, wrapped, _ = name.rpartition(".base_layer.")
        layer: Any = base.get_submodule(path)
        exported = name.replace(".base_layer.", ".")
        magnitude = getattr(layer, "lora_magnitude_vector", {})
        lengths = (magnitude[ADAPTER].weight,) if ADAPTER in magnitude else ()
        if not wrapped or not name.endswith(".weight"):
            yield ExportedTensor(exported, (parameter,))
        elif ADAPTER in layer.lora_A:
            parts = parameter, layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
            yield ExportedTensor(exported, (*parts, *lengths), layer.scaling[ADAPTER], layer.fan_in_fan_out)
        elif ADAPTER in layer.lora_embedding_A:
            parts = parameter, layer.lora_embedding_A[ADAPTER], layer.lora_embedding_B[ADAPTER]
            yield ExportedTensor(exported, (*parts, *lengths), layer.scaling[ADAPTER], transposed=True)
        else:
            raise UserError(f"model.lora.targets: adapters on {path} cannot be exported", code="adapters")


def persistent_buffers(base: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers that are saved with the model."""
    saved = base.state_dict().keys()
    return ((name, buffer) for name, buffer in base.named_buffers() if name in saved)


def exported_names(base: PreTrainedModel) -> list[str]:
    """Return the in-memory names of all tensors of the exported model."""
    buffers = (name for name, _ in persistent_buffers(base))
    return [*(tensor.name for tensor in exported_tensors(base)), *buffers]


def write_shards(directory: Path, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write tensors to safetensors files of at most SHARD_BYTES in a new directory."""
    directory.mkdir(parents=True)
    shard: dict[str, Tensor] = {}
    sizes: list[dict[str, int]] = []  # bytes of the tensors of each file

    def flush() -> None:
        save_file(shard, str(directory / f"part-{len(sizes):05d}"), metadata={"format": "pt"})
        sizes.append({name: tensor.nbytes for name, tensor in shard.items()})
        shard.clear()

    for name, tensor in tensors:
        if shard and sum(t.nbytes for t in shard.values()) + tensor.nbytes > SHARD_BYTES:
            flush()
        shard[name] = tensor
    flush()
    names = [f"model-{i + 1:05d}-of-{len(sizes):05d}.safetensors" for i in range(len(sizes))]
    if len(sizes) == 1:
        names = ["model.safetensors"]
    else:
        weight_map = {tensor: file for file, part in zip(names, sizes, strict=True) for tensor in part}
        index = {"metadata": {"total_size": sum(sum(p.values()) for p in sizes)}, "weight_map": weight_map}
        write_text(directory / "model.safetensors.index.json", json.dumps(index, indent=1))
    for i, name in enumerate(names):
        (directory / f"part-{i:05d}").rename(directory / name)


def write_metadata(base: PreTrainedModel, config: RunConfig, target: Path, info: dict[str, object]) -> None:
    """Write all files but the weights: configuration, generation defaults, tokenizer, card, export.json."""
    settings = copy.deepcopy(base.config)
    settings.architectures = [type(base).__name__]
    settings.use_cache = True
    vars(settings).pop("quantization_config", None)  # exported weights are not quantized
    settings.save_pretrained(target)
    decoding = base.generation_config
    model_ends = getattr(settings if decoding is None else decoding, "eos_token_id", None)
    changes, data_ends = special_ids(config, model_ends if isinstance(model_ends, list) else [model_ends])
    write_config(target, changes)
    if decoding is not None:
        # A GenerationConfig that was changed in memory has to pass checks that some published ones fail.
        decoding.save_pretrained(target)
        file = target / "generation_config.json"
        tree = json.loads(file.read_text(encoding="utf-8")) | changes
        write_text(file, json.dumps(tree, indent=2, sort_keys=True) + "\n")
    if (tokenizer := config.data.dir / "tokenizer").is_dir():
        changed = config.model.rope is not None or rope_type(settings) != "default"
        extended = context_length(settings) if changed else None
        write_tokenizer(tokenizer, target, data_ends, extended, config.data.template_variables)
    copy_processor(base, config.model.path, config.model.revision, target)
    write_text(target / EXPORT_INFO, json.dumps(info, indent=1, default=str))
    write_text(target / "README.md", _model_card(config, info))


def special_ids(config: RunConfig, model_ends: list[int | None]) -> tuple[dict[str, object], list[int]]:
    """Return the special token ids for an export's settings, and the ids that end the prepared data.

    A model stops at its own end tokens and at those of the data it was trained on. The ids of a new model are
    the defaults of its class, and are left out.
    """
    if not is_prepared(config.data):
        return {}, []
    manifest = read_manifest(config.data.dir / TRAIN)
    data_ends = manifest.answer_ends or ([] if manifest.eos_id is None else [manifest.eos_id])
    is_new = config.model.path is None
    ends = [token for token in [*([] if is_new else model_ends), *data_ends] if token is not None]
    ends = list(dict.fromkeys(ends))
    settings: dict[str, object] = {"bos_token_id": manifest.bos_id} if is_new else {}
    if ends:
        settings["eos_token_id"] = ends if len(ends) > 1 else ends[0]
    return settings, data_ends


def sample_rows(config: RunConfig) -> Tensor:
    """Return the first tokens of a few rows of the data, ids [rows, length]. Without data it is empty."""
    if not is_prepared(config.data):
        return torch.zeros(0, 0, dtype=torch.long)
    data = TokenDataset(config.data.dir / TRAIN)
    rows = np.linspace(0, len(data) - 1, min(len(data), SAMPLE_ROWS)).astype(np.int64)
    return torch.from_numpy(data.batch(rows)["input_ids"][:, :SAMPLE_TOKENS].copy())


def _model_card(config: RunConfig, info: dict[str, object]) -> str:
    """Return the model card. It is published with the model, so it names no directory of this machine."""
    path = config.model.path or ""
    origin = markdown(publishable(path or "a new model"))
    library = "peft" if config.model.exported == "adapter" else "transformers"
    objective = on_one_line(publishable(config.objective.label)).replace("`", "")
    names = (publishable(str(s.hub or s.files or s.embedded)) for s in config.data.sources)
    facts = (f"| {markdown(key)} | {markdown(publishable(str(v)))} |" for key, v in info.items())
    return (
        f"---\nlibrary_name: {library}\npipeline_tag: text-generation\n{base_of_card(path)}---\n"
        f"# {markdown(config.output_dir.name)}\n\nTrained from {origin} with the `{objective}` objective on "
        f"{', '.join(map(markdown, names))}.\n\n| fact | value |\n|---|---|\n" + "\n".join(facts) + "\n"
    )


def check_export(directory: Path, probe: Tensor, expected: Tensor, rows: Tensor) -> None:
    """Raise UserError if an export, loaded on the CPU, differs from the trained model.

    Do not call this in a process that trains, because transformers changes PyTorch's default dtype in all
    threads while it loads.

    Args:
        directory: The export. Its tensors must have the names that transformers gives them.
        probe: Token ids [1, T].
        expected: Logits of the trained model for `probe` [1, T, V].
        rows: Token ids of the data [rows, length]. The tokenizer must encode their texts as the data's does.
    """
    if (directory / "tokenizer.json").is_file():
        check_exported_tokenizer(directory, rows)
    unset_hf_deepspeed_config()
    if has_only_adapter(directory):
        model = _load_with_base(directory, expected.dtype)
        _compare_logits(directory, model, probe, expected)
        return
    loaded: Any = AutoModelForCausalLM.from_pretrained(directory, dtype="auto", output_loading_info=True)
    model, report = loaded

    if wrong := [*report["missing_keys"], *report["unexpected_keys"], *report["mismatched_keys"]]:
        raise _wrong_export(directory, f"tensors do not fit the configuration: {sorted(map(str, wrong))[:3]}")
    files = [safe_open(file, "pt") for file in directory.glob("*.safetensors")]
    written = {name for file in files for name in file.offset_keys()}
    in_memory = [(t.name, t.parts[0].detach()) for t in exported_tensors(model)]
    expected_names = saved_names(model, [*in_memory, *persistent_buffers(model)])
    if written != expected_names:
        names = sorted(written ^ expected_names)[:3]
        raise _wrong_export(directory, f"transformers gives tensors other names: {names}")
    _compare_logits(directory, model, probe, expected)
    if (directory / NESTED).is_dir():
        check_export(directory / NESTED, probe, expected, rows)


def _wrong_export(directory: Path, problem: str) -> UserError:
    return UserError(f"{directory}: {problem}", code="export")


def _load_with_base(directory: Path, dtype: torch.dtype) -> nn.Module:
    """Load an adapter and the base model that it names, as `emo eval` does."""
    name, revision = base_of_adapter(directory)
    base = Path(name) if Path(name).is_dir() else downloaded_directory(name, revision)
    with linked_directory(files_with_base(directory, base)) as joined:
        info = read_json(directory / EXPORT_INFO) if (directory / EXPORT_INFO).is_file() else {}
        options = nf4_options(info.get("base_dtype"), dtype, on_cpu=True)
        loaded = load_causal_lm(joined, dtype=dtype, **options)
        prepare_nf4(loaded.model)
    if loaded.faulty:
        raise _wrong_export(directory, f"the adapter does not fit {name}")
    return loaded.model


def _compare_logits(directory: Path, model: Any, probe: Tensor, expected: Tensor) -> None:
    """Raise UserError unless a loaded model has the logits of the trained model for `probe`."""
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=probe, use_cache=False).logits
    scale = expected.float().abs().max().clamp_min(1.0)
    error = ((logits.float() - expected.float()).abs().max() / scale).item()
    if not error <= TOLERANCE[model.dtype]:
        raise _wrong_export(directory, f"reloaded logits differ by {error:.2g} of their size")


def check_export_in_subprocess(directory: Path, probe: Tensor, expected: Tensor, rows: Tensor) -> None:
    """Run `check_export` in a subprocess, which does not affect training."""
    environment = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-m", "emo.pipeline.model.export", str(directory.absolute())],
        cwd=REPOSITORY,
        env=os.environ | environment,
        input=save({"probe": probe, "expected": expected, "rows": rows}),
        capture_output=True,
    )
    line = (done.stderr.decode(errors="replace").splitlines() or [f"exit code {done.returncode}"])[-1]
    if done.returncode == ExitCode.MISTAKE:
        raise UserError(line, code="export")
    if done.returncode:
        raise FailureError(f"cannot read {directory} back ({one_line(line, 200)})", code="export")


def main() -> int:
    """Check an export: `python -m emo.pipeline.model.export DIRECTORY`, with the tensors on stdin."""
    die_with_parent()
    os.nice(10)  # training comes first
    tensors = load(sys.stdin.buffer.read())
    try:
        check_export(Path(sys.argv[1]), **tensors)
    except (UserError, RuntimeError, ValueError) as error:
        print(one_line(error, 400), file=sys.stderr)
        return ExitCode.MISTAKE
    return ExitCode.DONE


if __name__ == "__main__":
    sys.exit(main())
