"""`make data`, with local directories in the place of the hub's."""

from __future__ import annotations

import json
from pathlib import Path

import zstandard

from emo.eval.icl.tasks import known_tasks, load_task
from tests.helpers.public_data import SETS, Files, Rows, fetch


def data_set(directory: Path, split: str, rows: list[dict[str, object]]) -> str:
    """A directory that the datasets library loads like one of the hub."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(directory)


def read(path: Path) -> str:
    with zstandard.open(path, "rt", encoding="utf-8", newline="") as lines:
        return str(lines.read())


def test_what_can_be_fetched_has_the_names_that_tests_know_and_the_rest_is_named(tmp_path: Path) -> None:
    wiki = data_set(tmp_path / "wiki", "train", [{"text": " = Ä = \n"}, {"text": ""}, {"text": "no end"}])
    rows = [{"instruction": f"i{n}", "output": "o", "more": "x"} for n in range(9)]
    alpaca = data_set(tmp_path / "alpaca", "train", rows)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "vocab.json").write_text("{}")
    out = tmp_path / "out"
    sets: dict[str, Rows | Files] = {
        "lm/no/train.txt.zst": Rows(str(tmp_path / "nowhere"), None, None, "train", ("text",)),
        "lm/column/train.txt.zst": Rows(wiki, None, None, "train", ("words",)),
        "lm/wiki/train.txt.zst": Rows(wiki, None, None, "train", ("text",)),
        "instruct/a/train.jsonl.zst": Rows(alpaca, None, None, "train", ("instruction", "output"), 2),
        "tokenizers/m": Files(str(tmp_path / "model"), ("vocab.json",)),
    }
    missing = [str(out / name) for name in list(sets)[:2]]
    assert [line.split(":")[0] for line in fetch(out, sets, [])] == missing
    assert not any(Path(name).exists() for name in missing)
    assert read(out / "lm/wiki/train.txt.zst") == " = Ä = \n\nno end\n"
    taken = [json.loads(line) for line in read(out / "instruct/a/train.jsonl.zst").splitlines()]
    assert taken == [{"instruction": "i0", "output": "o"}, {"instruction": "i1", "output": "o"}]
    assert (out / "tokenizers/m/vocab.json").read_text() == "{}"
    (out / "lm/wiki/train.txt.zst").write_bytes(b"mine")
    assert len(fetch(out, sets, [])) == 2
    assert (out / "lm/wiki/train.txt.zst").read_bytes() == b"mine"  # what is there stays


def test_every_built_in_task_has_a_hub_id() -> None:
    assert all(load_task(name).spec.hub is not None for name in known_tasks())
    assert all(
        name.endswith((".jsonl.zst", ".txt.zst")) for name, item in SETS.items() if isinstance(item, Rows)
    )
