"""Every real text and instruction set at hand, prepared for real: rows, tokens, rejects, waste, overlap."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from emo.common.errors import UserError
from emo.common.recipe import parse_section
from emo.data_prep.config import DataConfig
from emo.data_prep.prepare import prepare
from emo.data_prep.shards import TokenDataset
from emo.data_prep.verify import verify
from tests.bench import common

# Formats that the names and first lines do not show.
FORMATS = {
    "lm/tinyshakespeare/input.txt.zst": "document",
    "lm/wikitext-2-raw-v1/train_head_lossy.txt.zst": "lines",  # its headings are lost
}
BLOCKS = {"text": 256, "instruct": 512}


def prepare_all(data: Path, work: Path, workers: int, report: common.Report) -> None:
    """One row of the report for each file; files that are no such data must say so in one line."""
    for kind, folder in (("text", "lm"), ("instruct", "instruct")):
        for file in sorted(p for p in (data / folder).rglob("*") if p.suffix == ".zst"):
            name = str(file.relative_to(data))
            place = work / "real"
            shutil.rmtree(place, ignore_errors=True)
            source: dict[str, Any] = {"files": name, "format": FORMATS.get(name, "auto")}
            if "writingprompts" in name:
                source["clean"] = "writingprompts"
            tree = {
                "dir": str(place),
                "root": str(data),
                "kind": kind,
                "sequence_len": BLOCKS[kind],
                "shards": 2,
            }
            tree |= {
                "tokenizer": "tokenizers/llama",
                "sources": [source],
                "dedup": "near",
                "contamination": "nlu",
            }
            try:
                prepare(
                    parse_section(DataConfig, tree, "data"), (0, 1), workers, False, False, lambda _: None
                )
            except UserError as error:
                report.row(set=name, refused=str(error)[:100])
                continue
            faults = verify(place)[1]
            assert not faults, faults
            report.row(**_cells(name, place))


def _cells(name: str, place: Path) -> dict[str, Any]:
    """What the manifest and the overlap report say."""
    m = TokenDataset(place / "train").manifest
    overlap = json.loads((place / "train/contamination.json").read_text())["tasks"]
    touched = {task: found["overlapping"] for task, found in overlap.items() if found["overlapping"]}
    return {
        "set": name.removesuffix(".zst"),
        "source_rows": m.sources[0]["rows"],
        "used": m.documents,
        "rejected": _list(m.rejected),
        "rows": m.rows,
        "tokens": m.tokens,
        "targets": m.valid_tokens,
        "waste": f"{m.waste:.2%}",
        "cut": _list(m.counts),
        "test_rows_overlapping": _list(touched),
    }


def _list(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items()) or "-"
