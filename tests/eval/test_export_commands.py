"""emo export: which models, where to, and what is refused."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import parse_eval_result_entries
from hypothesis import given, settings
from hypothesis import strategies as st

from emo.eval import store
from emo.eval.export import figures, harness, hub
from emo.eval.results import pick, read_models
from tests.helpers.evaluating import command
from tests.helpers.results import RIGHT, fabricated, finish, finished, write_model, write_result

OUTCOMES = st.lists(st.tuples(st.booleans(), st.sampled_from("xyz")), min_size=1, max_size=20)


@settings(max_examples=10, deadline=None)
@given(OUTCOMES)
def test_what_is_read_back_is_what_was_found(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[bool, str]]
) -> None:
    out = tmp_path_factory.mktemp("results")
    write_model(out, "m")
    right, groups = [ok for ok, _ in rows], [g for _, g in rows]
    write_result(out, "m", "plain", right)
    write_result(out, "m", "grouped", right, groups)
    finish(out)
    model = pick(read_models([out]), "m")
    harness.write_harness(model, out / "exported", None)
    hub.write_hub(model, out / "card", lambda text: None)
    (path,) = (out / "exported" / "m").glob("results_*.json")
    actual = json.loads(path.read_text())["results"]
    listed = {r["dataset"]["type"] + r["dataset"]["name"]: r for r in index(out / "card")}
    assert len(listed) == 2
    for task, result in model.results.items():
        assert actual[task]["acc,none"] == pytest.approx(result["accuracy"], abs=1e-12)
        assert actual[task]["macro_f1,none"] == result["macro_f1"]
        entry = yaml.safe_load((out / "card" / ".eval_results" / f"emo-pipeline-{task}.yaml").read_text())
        assert parse_eval_result_entries(entry)[0].value == actual[task]["acc,none"]
    assert actual["plain"]["sample_len"] == actual["grouped"]["sample_len"] == len(rows)
    for group in set(groups):
        of_group = [ok for ok, g in rows if g == group]
        assert actual[f"grouped_{group}"]["acc,none"] == pytest.approx(statistics.fmean(of_group))
        assert actual[f"grouped_{group}"]["sample_len"] == len(of_group)


def index(directory: Path) -> list[dict[str, Any]]:
    (model,) = yaml.safe_load((directory / "README.md").read_text().split("---\n")[1])["model-index"]
    return model["results"]


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    out = tmp_path / "out"
    finished(out)
    fabricated(out, "mle", {"sst2": RIGHT})
    write_model(out, "described")
    finish(out)
    (tmp_path / "file").write_text("")

    def refused(results: Path, form: str, *options: object, to: Path = tmp_path / "to") -> bool:
        code, _, err = command("export", results, "--format", form, "--output_path", to, *options)
        return code == 2 and err.count("error: ") == 1 and not (tmp_path / "to").exists()

    assert refused(out, "lm_eval") and refused(tmp_path / "none", "hf")
    assert refused(out, "hf")  # of which of the models?
    assert refused(out, "hf", "--name", "mel") and refused(out, "hf", "--name", "described")
    assert refused(out, "hf", to=tmp_path / "file") and refused(out, "lm-eval", to=out)
    view = out / "models" / "mle" / "sst2.json"
    (out / "store" / json.loads(view.read_text())["key"] / "result.json").unlink()
    assert refused(out, "lm-eval", "--name", "mle")
    view.write_text("{")
    assert refused(out, "lm-eval", "--name", "mle")


@settings(max_examples=50, deadline=None)
@given(OUTCOMES)
def test_errors_are_those_of_the_definition(rows: list[tuple[bool, str]]) -> None:
    """s / sqrt(n) with n - 1, by another implementation; sqrt(sum of squares) / k over groups."""
    right = [ok for ok, _ in rows]
    whole = figures.accuracy(right)
    assert whole.value == pytest.approx(statistics.fmean(right)) and whole.n == len(right)
    if len(right) == 1:
        assert whole.stderr is None
    else:
        assert whole.stderr == pytest.approx(statistics.stdev(map(float, right)) / math.sqrt(len(right)))
    groups = [figures.accuracy([ok for ok, g in rows if g == group]) for group in {g for _, g in rows}]
    mean = figures.unweighted_mean(groups)
    assert mean.value == pytest.approx(statistics.fmean(group.value for group in groups))
    if any(group.n == 1 for group in groups):
        assert mean.stderr is None
    else:
        squares = [group.stderr**2 for group in groups if group.stderr is not None]
        assert mean.stderr == pytest.approx(math.sqrt(sum(squares)) / len(groups))


@pytest.mark.parametrize("change", [lambda r: r[2].update(prediction="a"), lambda r: r.pop()])
def test_results_that_do_not_follow_from_their_rows_are_not_exported(change: Any, tmp_path: Path) -> None:
    finished(tmp_path)
    for chunk in (tmp_path / "store").glob("*/chunks/*.json"):
        records: Any = store.unsealed(chunk)
        change(records)
        chunk.write_text(store.seal(records))
    for form in ("lm-eval", "hf"):
        assert command("export", tmp_path, "--format", form, "--output_path", tmp_path / "to")[0] == 2
        assert not (tmp_path / "to").exists()


def test_all_models_of_all_directories_are_exported(tmp_path: Path) -> None:
    for name in ("a", "b"):
        finished(tmp_path / name, name)
    write_model(tmp_path / "a", "described")
    arguments = ["--format", "lm-eval", "--output_path", tmp_path / "there"]
    code, out, _ = command("export", tmp_path / "a", tmp_path / "b", *arguments)
    assert code == 0 and "described has no finished result: left out" in out
    assert sorted(p.name for p in (tmp_path / "there").iterdir()) == ["a", "b"]
    assert {p.name for p in (tmp_path / "there").rglob("*.json")} == {"results_2027-01-15T08-00-00.json"}
