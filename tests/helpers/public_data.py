"""Fetch the public part of the real data for tests and benches from the hub (`make data`).

    python -m tests.helpers.public_data DIRECTORY

The files in eval/icl/tasks have the ids of tasks, and SETS has the others. Existing files are kept, so the
same command continues an interrupted fetch. Data without a public id (small checkpoints, copies with halved
test splits) is not fetched, and its tests are skipped. Exit codes: 0 complete, 1 some files could not be
fetched, 2 DIRECTORY is missing.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import zstandard

from emo.common.errors import ExitCode, UserError, one_line
from emo.common.io.files import write_atomically
from emo.eval.icl.task_data import hub_rows
from emo.eval.icl.tasks import known_tasks, load_task


class Rows(NamedTuple):
    """A split of a data set, as rows of JSON or as lines of text."""

    hub: str  # id, or a local directory
    config: str | None
    revision: str | None
    split: str
    columns: tuple[str, ...]  # only `text` for a text file
    limit: int | None = None  # maximum number of rows, from the start


class Files(NamedTuple):
    hub: str
    names: tuple[str, ...]


WIKITEXT = "b08601e04326c79dfdd32d625aee71d232d685c3"
# Directory or file, as tests name it -> its source.
SETS: dict[str, Rows | Files] = {
    **{
        f"lm/{config}/{split}.txt.zst": Rows("Salesforce/wikitext", config, WIKITEXT, split, ("text",))
        for config in ("wikitext-2-v1", "wikitext-2-raw-v1", "wikitext-103-v1")
        for split in ("train", "validation", "test")
    },
    "lm/tinystories/train.jsonl.zst": Rows("roneneldan/TinyStories", None, None, "train", ("text",), 20_000),
    "lm/tinystories/validation.jsonl.zst": Rows(
        "roneneldan/TinyStories", None, None, "validation", ("text",), 2_000
    ),
    "instruct/alpaca_gpt4/train.jsonl.zst": Rows(
        "vicgalle/alpaca-gpt4", None, None, "train", ("instruction", "input", "output")
    ),
    "tokenizers/gpt2": Files("openai-community/gpt2", ("vocab.json", "merges.txt")),
    "tokenizers/opt": Files("facebook/opt-125m", ("vocab.json", "merges.txt")),
    "tokenizers/llama": Files("huggyllama/llama-7b", ("tokenizer.model",)),
}


def fetch(directory: Path, sets: dict[str, Rows | Files], tasks: Iterable[str]) -> list[str]:
    """Make the missing files below `directory`. Return a line for each file that could not be made."""
    makers: dict[Path, Callable[[Path], None]] = {}
    for name, source in sets.items():
        if isinstance(source, Rows):
            makers[directory / name] = functools.partial(_write, rows=_rows(source))
        else:
            makers |= {directory / name / file: functools.partial(_copy, source.hub) for file in source.names}
    for task in map(load_task, tasks):
        for split in sorted({task.spec.splits.test, task.spec.splits.demonstrations}):
            path = directory / "nlu" / task.name / f"{split}.jsonl.zst"
            makers[path] = lambda path, task=task, split=split: _write(path, hub_rows(task, split)[0])  # type: ignore[misc]
    missing = []
    for path, make in makers.items():
        if path.exists():
            continue
        print(path, flush=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            make(path)
        except Exception as error:  # libraries raise many types, for example without network or access
            kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
            missing.append(f"{path}: {kind}{one_line(error, 150)}")
    return missing


def _rows(source: Rows) -> Iterator[dict[str, Any]]:
    """Stream rows, so that a limit avoids downloading the rest of a large set."""
    from datasets import load_dataset

    options = {"split": source.split, "revision": source.revision, "streaming": True}
    for row in islice(load_dataset(source.hub, source.config, **options), source.limit):
        yield {column: row[column] for column in source.columns}


def _write(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write a compressed file of text (.txt.zst) or JSON lines atomically."""
    text = path.name.endswith(".txt.zst")

    def write(sink: Any) -> None:
        with zstandard.ZstdCompressor().stream_writer(sink, closefd=False) as packed:
            for row in rows:
                line = row["text"] if text else json.dumps(row, ensure_ascii=False)
                packed.write((line if line.endswith("\n") else line + "\n").encode())

    write_atomically(path, write)


def _copy(hub: str, path: Path) -> None:
    from huggingface_hub import hf_hub_download

    source = Path(hub) / path.name if Path(hub).is_dir() else Path(hf_hub_download(hub, path.name))
    write_atomically(path, lambda sink: sink.write(source.read_bytes()))


def main(argv: list[str]) -> int:
    if len(argv) != 1:
        print("usage: python -m tests.helpers.public_data DIRECTORY", file=sys.stderr)
        return ExitCode.MISTAKE
    missing = fetch(Path(argv[0]), SETS, known_tasks())
    for line in missing:
        print(f"error: {line}", file=sys.stderr)
    print(f"{argv[0]}: " + (f"{len(missing)} files are missing; run it again" if missing else "complete"))
    return ExitCode.FAILURE if missing else ExitCode.DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
