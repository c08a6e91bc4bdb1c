"""Invented results directories, made from rows that are right or wrong."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from emo.eval.results import stats, store
from emo.eval.results.directory import MODEL, MODELS, Model, find_model, read_models

LABELS = ["a", "b"]
COMPARED = {
    **{"test_rows": "0123456789abcdef", "pool_rows": "123456789abcdef0", "prompt": "23456789abcdef01"},
    **{"shots": 8, "retriever": "minilm", "encoder": "3456789abcdef012", "inferencer": "prefix"},
    **{"faithful": False, "score": "openicl_ppl", "max_tokens": None, "scorer": 1},
}


def write_model(out: Path, name: str, **facts: Any) -> Path:
    """Write the directory of a model without results."""
    directory = out / MODELS / name
    directory.mkdir(parents=True, exist_ok=True)
    description = {"name": name, "path": f"models/{name}", "weights": store.digest_json(name), "facts": facts}
    description |= {"tokenizer": "t", "dtype": "auto"}
    (directory / MODEL).write_text(store.dump(description))
    return directory


def write_result(
    out: Path, name: str, task: str, right: Sequence[bool], groups: Sequence[str] | None = None,
    title: str = "", lost: Sequence[int] = (), **compared: Any,
) -> None:  # fmt: skip
    """Write a finished result. lost: dropped demonstrations per row. compared: changes of COMPARED."""
    key = store.digest_json([str(out), name, task])[:32]
    records: list[dict[str, Any]] = [
        {"row": i, "id": 2 * i, "gold": "a", "prediction": "a" if ok else "b", "demonstrations": [],
         "group": groups[i] if groups else "", "scores": {"openicl_ppl": [2.0 - ok, 1.0 + ok]}}
        for i, ok in enumerate(right)
    ]  # fmt: skip
    for record, dropped in zip(records, lost, strict=False):
        record |= {"dropped": dropped, "cut": 0}
    chunk = out / "store" / key / "chunks" / "00000.json"
    chunk.parent.mkdir(parents=True, exist_ok=True)
    chunk.write_text(store.seal_json(records))
    actual = stats.accuracy(list(right), groups).to_json()
    mistakes = [
        {"row": r["row"], "id": r["id"], "text": "a text", "gold": "a", "prediction": "b", "dropped": 0,
         "scores": {"a": 2.0, "b": 1.0}, "demonstrations": [{"text": "a text", "label": "a"}]}
        for r in records if r["prediction"] == "b"
    ]  # fmt: skip
    hits, noted = sum(right), {"prompt_version": "paper", "dtype": "auto"}
    result = {
        "task": task, "title": title or task, "version": "paper", "retriever": "minilm", "shots": 8,
        "labels": LABELS, "chance": 0.5, "majority": 1.0, "score": "openicl_ppl", **actual,
        "scores": {"openicl_ppl": actual}, "macro_f1": 0.5, "groups": {"g": {}} if groups else {},
        "confusion": [[hits, len(right) - hits], [0, 0]], "leaked": 0, "clean": actual,
        "rows_shortened": sum(map(bool, lost)), "rows_cut": 0, "worst": mistakes[:2],
        "conditions": {"compared": COMPARED | compared, "noted": noted},
    }  # fmt: skip
    rows_of = {"from_hub": False, "hub": None, "split": "test"}
    view = {"key": key, "weights": store.digest_json(name), "rows": rows_of, "result": result}
    (out / MODELS / name / f"{task}.json").write_text(store.dump(view))


def finish(out: Path, when: float = 1.8e9, from_hub: bool = False, hub: str = "SetFit/sst2") -> None:
    """Seal all results at a given time, and record the source of their rows, as evaluations do."""
    for path in (out / MODELS).glob("*/*.json"):
        view = json.loads(path.read_text())
        if path.name == MODEL:
            continue
        sealed = out / store.STORE / view["key"] / store.RESULT
        sealed.write_text(store.seal_json(view["result"]))
        os.utime(sealed, (when, when))
        before = {"path": hub, "name": None, "revision": "00ea8cc"}
        path.write_text(store.dump(view | {"rows": {"from_hub": from_hub, "hub": before, "split": "test"}}))


def fabricated(out: Path, name: str, right: dict[str, Sequence[bool]], **options: Any) -> Model:
    """Write results of a model by task, and return the model. right: whether each row is right."""
    write_model(out, name)
    for task, rows in right.items():
        write_result(out, name, task, rows, **options)
    return find_model(read_models([out]), name)


RIGHT = [True, True, False, True, False, True]
GROUPS = ["x", "x", "y", "y", "y", "z"]


def finished(out: Path, name: str = "emo", **facts: Any) -> Model:
    """Write and return an evaluated model with a plain task and a task of three groups."""
    write_model(out, name, **facts)
    write_result(out, name, "sst2", RIGHT, title="SST-2")
    write_result(out, name, "mmlu", RIGHT, GROUPS, title="MMLU")
    finish(out)
    return find_model(read_models([out]), name)


def tree(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}
