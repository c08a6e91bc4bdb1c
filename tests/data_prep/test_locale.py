"""Whatever the locale, the same recipe gives the same bytes, and names of files are UTF-8."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.corpus import file_bytes, texts, tiny_tokenizer, write_jsonl

ROOT = Path(__file__).parents[2]
RECIPE = """data:
  dir: данные
  tokenizer: {tokenizer}
  sequence_len: 64
  shards: 2
  validation_fraction: 0.2
  sources: [{{files: "исходник/*.jsonl"}}, {{files: "Größe.csv"}}]
"""
STRANGE = ("naïve", "日本 語", "Straße", "солнце", "▁", "e\u0301", "\u2028", "🙂")


def commands(folder: Path, workers: int, **variables: str) -> dict[str, bytes]:
    """What `prepare` and `verify` leave behind under some variables of the environment."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("LC_", "LANG", "PYTHONUTF8"))}
    environment |= {"PYTHONPATH": str(ROOT)} | variables
    for command in (
        ["prepare", "recipe.yaml", "--workers", str(workers)],
        ["prepare", "recipe.yaml"],
        ["verify", "данные"],
        ["inspect", "данные"],
    ):
        done = subprocess.run(
            [sys.executable, "-m", "emo", *command], cwd=folder, env=environment, capture_output=True
        )
        assert done.returncode == 0, done.stderr.decode(errors="replace")
    found = file_bytes(folder / "данные")
    shutil.rmtree(folder / "данные")
    return found


@pytest.mark.slow
def test_the_locale_changes_no_byte(tmp_path: Path) -> None:
    folder = tmp_path / "ordner ä"
    rows = [f"{text} {' '.join(STRANGE)}" for text in texts(120)]
    write_jsonl(folder / "исходник" / "ключ.jsonl", ({"text": row} for row in rows))
    table = "".join(f'"{row} {i}"\n' for i, row in enumerate(rows))
    (folder / "Größe.csv").write_text("text\n" + table, encoding="utf-8")
    (folder / "recipe.yaml").write_text(RECIPE.format(tokenizer=tiny_tokenizer()), encoding="utf-8")
    expected = commands(folder, 1, LC_ALL="C.UTF-8")
    assert any(name.endswith(".arrow") for name in expected)
    assert commands(folder, 2, LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0") == expected
    made = tmp_path / "locales" / "en_US.ISO-8859-1"
    made.parent.mkdir()
    subprocess.run(["localedef", "-i", "en_US", "-f", "ISO-8859-1", made], check=True, capture_output=True)
    latin = {"LC_ALL": made.name, "LOCPATH": str(made.parent), "PYTHONUTF8": "0"}
    assert commands(folder, 2, **latin) == expected
