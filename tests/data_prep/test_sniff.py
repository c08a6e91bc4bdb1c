"""`sniff`: what it prints is what `prepare` then makes: the lines are pasted, prepared and inspected."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from rich.console import Console

from emo.data_prep.cli import main
from emo.data_prep.config import load_data_config
from emo.data_prep.inspect import inspect
from emo.data_prep.sniff import sniff
from emo.data_prep.verify import verify
from tests.conftest import REPO
from tests.data_prep.test_chat import CHATML, THINKING, tokenizer_with
from tests.helpers.corpus import alpaca_rows, run, texts, tiny_tokenizer, train_set, write_jsonl

TALK = [{"from": "human", "value": "two birds"}, {"from": "gpt", "value": "sing"}]


def shown(files: Path | str, tokenizer: Path | None = None, colours: bool = False) -> tuple[str, str]:
    """What is printed, and the recipe."""
    sink = io.StringIO()
    console = Console(
        file=sink, force_terminal=colours, width=100, color_system="truecolor" if colours else None
    )
    recipe = sniff(str(files), None if tokenizer is None else str(tokenizer), console)
    return sink.getvalue(), recipe


def chats(count: int) -> list[dict[str, Any]]:
    pairs = (("user", "ask"), ("assistant", "say")) * 2
    return [
        {"messages": [{"role": who, "content": f"{text} {i}"} for who, text in pairs]} for i in range(count)
    ]


# what is written, and what the recipe must say of it
CSV = "".join(f'"{row["instruction"]}","{row["output"]}"\n' for row in alpaca_rows(80))
BOOK = "\n\n".join("\n".join(text.split(". ")) for text in texts(90, sentences=8)) + "\n"
SHARED = json.dumps([{"conversations": TALK}] * 2 + chats(60))
FILES: dict[str, tuple[Callable[[Path], Any], list[str]]] = {
    "alpaca.jsonl": (lambda p: write_jsonl(p, alpaca_rows(80)), ["kind: instruct", "template: alpaca"]),
    "own names.csv": (lambda p: p.write_text(f'"Frage, bitte",reply\n{CSV}'), ["instruction: Frage, bitte"]),
    "share.json": (lambda p: p.write_text(SHARED), ["template: chat"]),
    "body.parquet": (lambda p: pyarrow.parquet.write_table(pa.table({"body": texts(90)}), p), ["text: body"]),
    "lines.txt": (lambda p: p.write_text("\n".join(texts(90))), ["lines.txt\n"]),
    "book [1].txt": (lambda p: p.write_text(BOOK), ["format: paragraphs"]),
}


@pytest.mark.parametrize("name", FILES)
def test_the_lines_work_when_they_are_pasted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    write, expected = FILES[name]
    write(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    printed, recipe = shown(name, tiny_tokenizer())
    assert recipe.strip() in "\n".join(line.rstrip() for line in printed.splitlines())
    assert all(line in recipe for line in expected), recipe
    (tmp_path / "recipe.yaml").write_text(recipe)
    config = load_data_config(tmp_path / "recipe.yaml", [])
    run(config)
    assert verify(config.dir)[1] == [] and len(train_set(config)) > 0
    sink = io.StringIO()
    inspect(config.dir / "train", 1, 0, Console(file=sink))
    assert "supervised" in sink.getvalue()


def test_by_the_commands_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """sniff, paste, prepare, inspect: as a newcomer does it."""
    rows = [{"ask": row["instruction"], "reply": row["output"]} for row in alpaca_rows(60)]
    write_jsonl(tmp_path / "mine.jsonl", rows)
    done = subprocess.run(
        [sys.executable, "-m", "emo", "sniff", "mine.jsonl", "--tokenizer", str(tiny_tokenizer())],
        cwd=tmp_path,
        env={"PYTHONPATH": str(REPO), "NO_COLOR": "1", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == "mine.jsonl: loading libraries\n"
    assert "⟦" in done.stdout and "\x1b" not in done.stdout
    lines = done.stdout.splitlines()
    start = next(i for i, line in enumerate(lines) if "recipe lines to paste" in line) + 1
    (tmp_path / "recipe.yaml").write_text("\n".join(lines[start:]) + "\n")
    monkeypatch.chdir(tmp_path)
    assert main(["prepare", "recipe.yaml", "--workers", "1"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "runs/data/mine: cut or dropped: nothing"
    assert main(["inspect", "runs/data/mine"]) == 0
    assert "60 in 60 segments" in capsys.readouterr().out


def test_examples_show_what_is_supervised(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"instruction": "ask", "output": "the answer"}])
    for tokenizer, answer in ((None, "the answer"), (tiny_tokenizer(), "the answer</s>")):
        plain, _ = shown(tmp_path / "a.jsonl", tokenizer)
        assert f"### Response:⟦{answer}" in plain and plain.count("⟦") == 2 and "\x1b" not in plain
        coloured, _ = shown(tmp_path / "a.jsonl", tokenizer, colours=True)
        assert f"\x1b[1;32m{answer}" in coloured and "⟦" not in coloured
    write_jsonl(tmp_path / "b.jsonl", texts(40))
    plain, _ = shown(tmp_path / "b.jsonl", tiny_tokenizer())
    assert [plain.count(f"row {at} ─") for at in (1, 20, 21, 40)] in ([1, 1, 0, 1], [1, 0, 1, 1])


def test_a_chat_template_is_used_where_it_can_be(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", chats(40))
    for template, expected in ((CHATML, "chat_template"), (THINKING, "chat")):
        printed, recipe = shown(tmp_path / "a.jsonl", tokenizer_with(template, tmp_path))
        assert f"template: {expected}\n" in recipe
        assert ("cannot be used" in printed) == (template is THINKING)
        if template is CHATML:
            assert "⟦say 0<|im_end|>⟧" in printed
        (tmp_path / "recipe.yaml").write_text(recipe)
        config = load_data_config(tmp_path / "recipe.yaml", [f"data.dir={tmp_path / expected}"])
        run(config)
        assert train_set(config).manifest.documents == 40
