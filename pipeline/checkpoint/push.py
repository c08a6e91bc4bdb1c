"""Push an export to the Hub, with a model card if it has none."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from emo.common.config.recipe import read_written
from emo.common.errors import FailureError, UserError, iterate_causes, one_line
from emo.common.io.files import write_text
from emo.common.io.hub import OFFLINE, base_of_card
from emo.common.io.objects import local_directory
from emo.common.io.untrusted import number
from emo.common.io.weights import (
    ADAPTER,
    ADAPTER_FILE,
    CONFIG,
    NESTED,
    base_of_adapter,
    has_only_adapter,
    opened_files,
)
from emo.common.text import markdown, publishable
from emo.data_prep.config import TRAIN
from emo.data_prep.shards.format import read_manifest

from ..control import run_dir as layout
from ..control.run_dir import COMPLETE, EXPORT, EXPORT_INFO, HF, checkpoint_problem, read_export_info

CARD = "README.md"
# Files of an earlier upload that would be loaded instead of those of this one, or together with them.
STALE = ["*.safetensors", "*.bin", "*.index.json", CONFIG, ADAPTER]
STALE += ["tokenizer*", "chat_template*", "additional_chat_templates/*", "special_tokens_map.json"]
STALE += ["added_tokens.json", "vocab.json", "merges.txt", "*processor_config.json"]
RESULTS = ".eval_results/*.yaml"  # written by `emo export --format hf`
STALE += [".eval_results/emo-pipeline-*.yaml"]


def push_export(source: Path, repository: str, private: bool, revision: str | None) -> str:
    """Upload an export to a model repository, which is created if it does not exist. Return its address.

    Args:
        source: The export, or the run or checkpoint that contains it.
        repository: Hub id OWNER/NAME, or NAME for the owner of the token.
        private: Create a private repository, or require that the existing one is private.
        revision: Branch to create or extend. None: the main branch.

    Raises UserError for an incomplete export or a missing permission, FailureError if a retry may succeed.
    """
    from huggingface_hub import HfApi, get_token

    export = find_export(source)
    check_files(export)
    if get_token() is None:
        raise UserError("no token of the Hub. Run `hf auth login`, or set HF_TOKEN", code="hub-access")
    api = HfApi()
    try:
        url = api.create_repo(repository, private=private or None, exist_ok=True)
        if private and not api.repo_info(url.repo_id).private:
            problem = f"{url.repo_id} exists and is public, so nothing was uploaded"
            raise UserError(f"{problem}. Make it private, or remove --private", code="hub-access")
        if revision is not None:
            api.create_branch(url.repo_id, branch=revision, exist_ok=True)
        with staged_files(export, url.repo_id) as folder:
            message = f"Upload {export.parent.name if export.name in (EXPORT, HF) else export.name}"
            api.upload_folder(
                repo_id=url.repo_id,
                folder_path=folder,
                revision=revision,
                commit_message=message,
                delete_patterns=STALE,
            )
    except UserError:
        raise
    except Exception as error:  # the hub raises many kinds of errors
        raise _explain(repository, error) from None
    return f"{url}/tree/{revision}" if revision is not None else str(url)


def _explain(repository: str, error: Exception) -> UserError:
    """Return the error for a request that failed."""
    status = getattr(getattr(error, "response", None), "status_code", 0)
    if status in (401, 403, 404):
        problem = f"your token may not write to {repository} (HTTP {status})"
        return UserError(f"{problem}. Set HF_TOKEN to a token with write access to it", code="hub-access")
    offline = any(type(cause).__name__ in OFFLINE for cause in iterate_causes(error))
    if offline or status == 429 or status >= 500:
        reason = f"HTTP {status}" if status else one_line(error, 120)
        return FailureError(f"the Hub cannot be reached ({reason}). Try again later", code="hub-offline")
    return UserError(f"{repository}: the Hub rejected the upload ({one_line(error, 300)})", code="hub-upload")


def find_export(source: Path) -> Path:
    """Return the complete export that `source` is or contains. Raises UserError if there is none."""
    is_checkpoint = (source / COMPLETE).is_file()
    if is_checkpoint and (problem := checkpoint_problem(source)) is not None:
        raise UserError(f"{source} is not a valid checkpoint: {problem}", code="checkpoint-damaged")
    for directory in (source / EXPORT, source / HF, source):
        unfinished = directory.name.endswith(".partial") or (directory == source / HF and not is_checkpoint)
        if not unfinished and ((directory / CONFIG).is_file() or has_only_adapter(directory)):
            return directory
    problem = f"{source} has no complete export"
    raise UserError(f"{problem}. Export a checkpoint of it with `emo export-model`", code="no-export")


def check_files(export: Path) -> None:
    """Raise UserError if weights are missing or truncated."""
    for folder in (export, export / NESTED):
        if has_only_adapter(folder) and Path(base := base_of_adapter(folder)[0]).exists():
            problem = f"the base model of {folder} is the local directory {base}, which others do not have"
            cure = f"Push a merged model, or set base_model_name_or_path in {folder / ADAPTER} to a Hub id"
            raise UserError(f"{problem}. {cure}", code="adapter")
    adapter = [export / ADAPTER, export / ADAPTER_FILE]
    for path in adapter if has_only_adapter(export) else opened_files(export):
        try:
            if path.suffix == ".safetensors":
                with safe_open(path, framework="np"):
                    pass  # compares the length with the header
        except (OSError, SafetensorError) as error:
            problem = f"{path} is missing or incomplete ({one_line(error, 120)})"
            raise UserError(f"{problem}. Export the model again", code="no-weights") from None


@contextlib.contextmanager
def staged_files(export: Path, repository: str) -> Iterator[Path]:
    """Yield a directory with links to the files to upload. Files that name local paths are rewritten."""
    with tempfile.TemporaryDirectory(prefix="emo-push-") as staging:
        folder = Path(staging)
        for file in (path for path in export.rglob("*") if path.is_file()):
            name = file.relative_to(export)
            if any(part[0] == "." for part in name.parts) and not name.match(RESULTS):
                continue
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if file.name in (EXPORT_INFO, ADAPTER):
                write_text(target, publishable(file.read_text(encoding="utf-8")))
            else:
                target.symlink_to(file.resolve())
        if not (export / CARD).exists():
            write_text(folder / CARD, model_card(export, repository.rpartition("/")[2]))
        yield folder


def model_card(export: Path, name: str) -> str:
    """Return a model card for an export without one: base model, objective, data and validation."""
    run_dir = export.parent.parent if export.name == HF else export.parent
    info: dict[str, Any] = {}
    config: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        info = read_export_info(export)
    with contextlib.suppress(OSError, ValueError):
        config = read_written(run_dir / layout.CONFIG)
    origin = str(info.get("origin") or config.get("model", {}).get("path") or "")
    front = ["---", "library_name: transformers", "pipeline_tag: text-generation"]
    front += base_of_card(origin).splitlines()
    base = f"Base model: {markdown(publishable(origin))}." if origin and origin != "new" else "A new model."
    lines = [*front, "---", f"# {markdown(name)}", "", base]
    if objective := info.get("objective") or config.get("objective", {}).get("name"):
        lines.append(f"Objective: {markdown(publishable(str(objective)))}.")
    if isinstance(merged := info.get("merged"), dict):  # no run has its weights
        models = ", ".join(markdown(publishable(str(model))) for model in merged.get("models", []))
        lines.append(f"Merged ({merged.get('method')}) from {models}.")
    else:
        lines += [*_data_lines(config), *_validation_lines(run_dir, info)]
    return "\n".join(lines) + "\n"


def _data_lines(config: Mapping[str, Any]) -> list[str]:
    """Return the data sets of a run with their shares of the training rows."""
    try:
        sources = read_manifest(local_directory(config["data"]["dir"]) / TRAIN).sources
        rows = [int(source["train"]) for source in sources]
    except (OSError, ValueError, LookupError, TypeError, UserError):
        return []
    named = zip(sources, rows, strict=True)
    table = [
        f"| {markdown(publishable(str(source['name'])))} | {count:,} | {count / max(1, sum(rows)):.1%} |"
        for source, count in named
    ]
    return ["", "| data | rows | share |", "|---|---|---|", *table]


def _validation_lines(run_dir: Path, info: Mapping[str, Any]) -> list[str]:
    """Return the validation of the exported step for each set, or the last one before it."""
    last: dict[str, Any] = {}
    for record in layout.read_metrics(run_dir):
        measured = number(record.get("validation_nll")) is not None
        if measured and record["step"] <= info.get("step", record["step"]):
            last[record["set"]] = record
    table = []
    for name, record in last.items():
        change = ""
        keys = ("validation_change", "validation_change_low", "validation_change_high")
        known = [f"{value:+.4f}" for key in keys if (value := number(record.get(key))) is not None]
        if len(known) == len(keys):  # too few documents give no interval
            change = f"{known[0]} [{known[1]}, {known[2]}]"
        table.append(f"| {markdown(name)} | {record['step']} | {record['validation_nll']:.4f} | {change} |")
    header = ["", "| validation set | step | NLL per token | change since step 0 |", "|---|---|---|---|"]
    return [*header, *table] if table else []
