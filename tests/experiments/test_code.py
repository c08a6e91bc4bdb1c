"""What is cached is made again by other code: of the study, of plug-ins, and of the commands of a sweep."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

import experiments.code
from common.recipe import load_section
from experiments.code import code_digest, sources
from experiments.known_truth import study
from experiments.origin import command_origin
from experiments.stages import Stage
from tests.conftest import REPO


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Modules of which `room.command` imports `deep` through `room.part`, and none imports `aside`."""
    (tmp_path / "room").mkdir()
    for name, text in {
        "room/__init__": "",
        "room/command": "import json\nfrom room.part import answer\n",
        "room/part": "def answer():\n    from deep import number\n    return number\n",
        "deep": "number = 1\n",
        "aside": "import deep\n",
    }.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.setattr(experiments.code, "REPOSITORY", tmp_path)
    code_digest.cache_clear()
    yield tmp_path
    code_digest.cache_clear()


@pytest.mark.parametrize(
    ("file", "counts"),
    [("room/__init__", True), ("room/command", True), ("room/part", True), ("deep", True), ("aside", False)],
)
def test_code_is_what_a_module_imports(project: Path, file: str, counts: bool) -> None:
    before = code_digest("room.command")
    (project / f"{file}.py").write_text("changed = True\n")
    code_digest.cache_clear()
    assert (code_digest("room.command") != before) is counts


def test_what_makes_a_cell_is_among_the_code_of_the_study() -> None:
    modules = sources("experiments.known_truth.study").keys()
    assert modules >= {f"experiments.known_truth.{name}" for name in ("bigram", "expected", "temperature")}
    assert modules >= {"pipeline.loss.objectives", "pipeline.loss.registry", "eval.generation.distributions"}


def test_a_command_whose_code_changed_is_done_again(project: Path, tmp_path: Path) -> None:
    def stage() -> Stage:
        command = ["python", "-m", "room.command", "--out", "x"]
        return Stage("measure", command, tmp_path / "note.json", command_origin(command, tmp_path / "out"))

    stage().finish(1.0)
    assert stage().done
    (project / "deep.py").write_text("number = 2\n")
    code_digest.cache_clear()
    assert not stage().done


PLUGIN = "import torch\n\ndef scaled(m):\n    return torch.full_like(m, {})\n"


def test_cells_are_made_again_by_other_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each change of the study's code, a plug-in, a parameter or a share makes its cell anew."""
    (tmp_path / "plugin.py").write_text(PLUGIN.format(1.0))
    tree = {
        "out": str(tmp_path / "out"),
        "contestants": {"mle": {"name": "mle"}, "mine": {"name": f"{tmp_path / 'plugin.py'}:scaled"}},
        "vocabularies": [6],
        "shares": [0.12345678],
        "tokens": [200],
        "truths": 2,
        "steps": 20,
        "rates": [3e-3],
    }
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(tree))
    made = []
    measure = study.measure_cell
    monkeypatch.setattr(study, "fixed_points", lambda _: [])
    monkeypatch.setattr(study, "measure_cell", lambda *given: made.append(given) or measure(*given))

    def run(*overrides: str) -> int:
        study.run(load_section(study.Study, tmp_path / "study.yaml", list(overrides)))
        return len(made)

    assert [run(), run()] == [1, 1]
    assert [run("shares=[0.12345679]"), run("steps=40"), run()] == [2, 3, 3]
    (tmp_path / "plugin.py").write_text(PLUGIN.format(2.0))
    assert [run(), run()] == [4, 4]
    monkeypatch.setattr(study, "code_digest", lambda _: "other")
    assert [run(), run()] == [5, 5]


def test_truths_are_independent(tmp_path: Path) -> None:
    """No truth is met twice, in a cell or in two; the same cell has the same ones in any study."""
    shipped = load_section(study.Study, REPO / "experiments/known-truth-quick.yaml", [])
    drawn = [study.draw_truths(shipped, 8, 0.5, tokens) for tokens in (500, 5000)]
    rows = {json.dumps(truth.rows.tolist()) for truths in drawn for truth in truths}
    assert len(rows) == 2 * shipped.truths
    again = study.draw_truths(shipped.model_copy(update={"truths": 2}), 8, 0.5, 500)
    assert again[1].rows.equal(drawn[0][1].rows)
