"""Comparisons of models, gates on stored results, and the report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from emo.common.report.document import HEADLINE
from emo.common.report.numbers import p_value
from emo.data_prep.selection.similarity.contamination import SHARED, row_digest
from emo.eval.report.compare import compare_models, find_regression, gate
from emo.eval.report.gather import Report
from emo.eval.report.page import document
from emo.eval.results import store
from emo.eval.results.directory import find_model, read_models
from tests.helpers import picture
from tests.helpers.evaluating import command, is_mistake, read_lines, tiny_model
from tests.helpers.html import Page
from tests.helpers.refusals import refused
from tests.helpers.results import fabricated, write_model, write_result
from tests.helpers.said import lines

GOOD, BAD = [True] * 40, [True] * 10 + [False] * 30


def test_a_clear_regression_is_detected(tmp_path: Path) -> None:
    good = fabricated(tmp_path, "good", {"sst2": [True] * 80 + [False] * 20, "trec": [True] * 50})
    bad = fabricated(tmp_path, "bad", {"sst2": [True] * 60 + [False] * 40, "trec": [True] * 50})
    verdict = find_regression(good, bad)
    assert verdict.regressions
    assert "sst2 -20.0 points" in verdict.summary and "mean -10.0 points" in verdict.summary
    assert (
        not find_regression(bad, good).regressions
        and not find_regression(good, bad, only=["trec"]).regressions
    )
    assert find_regression(good, bad, 5.0).regressions != find_regression(good, bad, 15.0).regressions
    alone = compare_models(good, bad, ["sst2"])
    assert alone.mean is not None and alone.mean.p == alone.tasks["sst2"].p_mcnemar
    with refused("own-baseline"):
        find_regression(good, good)


def test_results_under_different_conditions_are_not_compared(tmp_path: Path) -> None:
    """The gold labels are the same, but the settings differ."""
    a = fabricated(tmp_path, "a", {"sst2": GOOD, "trec": GOOD})
    fabricated(tmp_path, "b", {"sst2": GOOD})
    write_result(tmp_path, "b", "trec", GOOD, unheard_of=1)
    comparison = compare_models(a, read_models([tmp_path])[1], ["sst2", "trec"])
    assert list(comparison.tasks) == ["sst2"] and list(comparison.refused) == ["trec"]
    assert is_mistake("compare", "a", "b", "--results", tmp_path)


def test_a_view_that_differs_from_the_sealed_result_is_skipped(tmp_path: Path) -> None:
    """The view is easily edited and the store is not, so they must agree."""
    for name in "ab":
        fabricated(tmp_path, name, {"sst2": [True] * 10, "trec": [True, False] * 5})
    path = tmp_path / "models" / "b" / "trec.json"
    view = json.loads(path.read_text())
    sealed = tmp_path / "store" / view["key"] / "result.json"
    store.replace(sealed, store.seal_json(view["result"]))
    assert lines(command("compare", "a", "b", "--results", tmp_path)[2]) == []
    path.write_text(json.dumps(view | {"result": view["result"] | {"accuracy": 0.9}}))
    code, _, err = command("compare", "a", "b", "--results", tmp_path)
    assert code == 0 and f"skipped {path}" in err
    sealed.write_text("{")  # a damaged result cannot contradict a view
    assert "trec" in read_models([tmp_path])[1].results


def test_a_gate_considers_only_the_named_tasks(tmp_path: Path) -> None:
    """Results of other tasks may be worse or missing. A gate that cannot fail is a mistake."""
    fabricated(tmp_path, "base", {"sst2": GOOD, "trec": GOOD, "mr": GOOD})
    fabricated(tmp_path, "new", {"sst2": BAD, "trec": GOOD})
    gate, drop = "--fail_on_regression", "--max_drop"
    for options, code in (
        ([gate], 3), ([gate, "sst2"], 3), ([gate, "sst2,trec"], 3), ([gate, "trec"], 0),
        ([gate, "trec,mr"], 2), ([gate, "mr"], 2), ([gate, "sst3"], 2), ([gate, "sst2,"], 2),
        ([drop, 1], 2), ([gate, drop, "nan"], 2),
    ):  # fmt: skip
        assert command("compare", "base", "new", "--results", tmp_path, *options)[0] == code, options


def test_prompts_that_lost_demonstrations_are_the_first_line_and_fail_gates(tmp_path: Path) -> None:
    """If the models lost different demonstrations, the gate fails. If both lost the same, a line says so."""
    for name, lost in (("long", [0] * 40), ("short", [8] * 12 + [0] * 28), ("same", [8] * 12 + [0] * 28)):
        write_model(tmp_path, name)
        write_result(tmp_path, name, "sst2", GOOD if name != "short" else BAD, title="SST-2", lost=lost)
    for a, b, code, first in (("long", "short", 2, "12 differ between models"), ("short", "same", 0, "both")):
        status, out, _ = command("compare", a, b, "--results", tmp_path)
        assert status == 0 and first in out.splitlines()[0] and "12 of 40" in out.splitlines()[0]
        assert command("compare", a, b, "--results", tmp_path, "--fail_on_regression")[0] == code
    with refused("lost-demonstrations"):
        gate([find_regression(*(find_model(read_models([tmp_path]), name) for name in ("long", "short")))])
    page = document(Report([tmp_path], chosen=["long"]))
    assert any("12 of 40" in remark and "different prompts" in remark for remark in page.remarks)


def test_the_picture_in_the_readme_is_current(tmp_path: Path) -> None:
    data = picture.PICTURE.read_bytes()
    assert picture.source(picture.write_page(tmp_path)) in data, "run make report-picture"
    assert len(data) <= 300_000


TASKS = "sst2,mmlu"


@pytest.fixture(scope="module")
def evaluated(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Evaluate two runs, one of them at two steps, with training logs and sampled text."""
    root = tmp_path_factory.mktemp("report")
    for objective, step in (("mle", 100), ("mle", 200), ("emo", 200)):
        run, name = root / "runs" / objective, f"{objective}-{step}"
        path = tiny_model(root / "models" / name, seed=step + len(objective) * (objective == "emo"))
        facts = {"step": step, "tokens": step * 4096, "objective": objective, "run": str(run)}
        (path / "export.json").write_text(json.dumps(facts))
        arguments = ["--model", path, "--name", name, "--output_path", root / "out"]
        assert command("eval", *arguments, "--tasks", TASKS, "--data", world / "data")[0] == 0
        prepared = root / "prepared" / objective / "train"
        for folder in (run, prepared):
            folder.mkdir(parents=True, exist_ok=True)
        record = json.dumps({"step": 8, "tokens": 8 * 4096, "nll": 5, "demd": 1, "loss": 1.0})
        (run / "metrics.jsonl").write_text(record + '\n{"step": 9, "tok')
        rows = read_lines(world / "data" / "sst2" / "test.jsonl")
        texts = [row_digest(text) for text in (rows[0]["text"].upper(), f" {rows[3]['text']}", "elsewhere")]
        overlap = {"tasks": {"sst2": {SHARED: dict.fromkeys(texts, 0.5)}}}
        (prepared / "contamination.json").write_text(json.dumps(overlap))
        (run / "config.yaml").write_text(f"data: {{dir: {prepared.parent}}}\n")
    assert command("generate", *arguments, "--samples", 2, "--max_new_tokens", 12)[0] == 0
    return root


def test_the_report_of_real_evaluations(evaluated: Path, tmp_path: Path) -> None:
    """The report has all sections, the same numbers in three formats, and the spread over seeds."""
    runs = [f"--run={o}-200={evaluated / 'runs' / o}" for o in ("mle", "emo")]
    options = [*runs, "--notice", "Toy <b>.", "--repeats", "both=emo-200,mle-200"]
    assert command("report", evaluated / "out", "--output_path", f"{tmp_path}/", *options)[0] == 0
    text, markdown = ((tmp_path / f"report.{kind}").read_text(encoding="utf-8") for kind in ("html", "md"))
    page, data = Page(text), json.loads((tmp_path / "results.json").read_text())
    assert "Toy &lt;b&gt;." in text and page.answer == data["answer"][0]
    assert {"Accuracy", "Training", "Accuracy over training", "Sampled text"} < set(page.sections)
    assert len(data["rows"]) == 3 * 2
    for r in data["rows"]:
        assert {"chance", "n", "openicl_ppl", "suffix_sum", "suffix_mean"} <= set(r)
        texts = f"{100 * r['accuracy']:.1f}", f"{100 * r['low']:.1f} to {100 * r['high']:.1f}"
        assert all(number in text and number in markdown for number in texts)
    sst2 = {r["model"]: r for r in data["rows"] if r["task"] == "sst2"}
    values = [sst2[name]["accuracy"] for name in ("mle-200", "emo-200")]
    assert data["seeds"]["both"]["sst2"] == pytest.approx([np.mean(values), np.std(values, ddof=1)])
    assert f"{100 * np.mean(values):.1f} ± {100 * np.std(values, ddof=1):.1f}" in markdown

    assert sst2["mle-100"]["trained_on"] is None, "what is not known is not claimed to be none"
    assert sst2["emo-200"]["trained_on"] == 2, "rows 0 and 3, as data preparation says"
    records = next(m for m in read_models([evaluated / "out"]) if m.name == "emo-200").read_records("sst2")
    correct = [r["prediction"] == r["gold"] for r in records if r["id"] not in (0, 3)]
    assert sst2["emo-200"]["untrained_accuracy"] == pytest.approx(np.mean(correct)) and len(correct) == 10


def test_a_regression_has_an_exit_code(world: Path, evaluated: Path) -> None:
    """A baseline that does not exist is rejected before any work."""
    models = Report([evaluated / "out"]).models
    means = {m.name: np.mean([result["accuracy"] for result in m.results.values()]) for m in models}
    best, worst = max(means, key=means.__getitem__), min(means, key=means.__getitem__)
    options = [
        "--data",
        world / "data",
        "--tasks",
        TASKS,
        "--output_path",
        evaluated / "out",
        "--max_drop",
        0,
    ]
    for name, baseline, code in ((worst, best, 3), (best, worst, 0), (best, "nobody", 2)):
        arguments = ["--model", evaluated / "models" / name, "--name", name, *options]
        assert command("eval", *arguments, "--fail_on_regression", baseline)[0] == code


def written(out: Path, **options: Any) -> tuple[Page, str, dict[str, Any]]:
    """Return page, Markdown and JSON of a report on all results in `out`."""
    report = document(Report([out], **options))
    return Page(report.html()), report.markdown(), json.loads(report.json())


def models(out: Path, **shares: Any) -> None:
    """Write models by name. A value is the share of 40 rows that are right, or (share, facts)."""
    for name, value in shares.items():
        share, facts = value if isinstance(value, tuple) else (value, {})
        write_model(out, name, **facts)
        for task in ("sst2", "trec"):
            write_result(out, name, task, [i < share * 40 for i in range(40)])


def trained(objective: str, origin: str, name: str = "") -> dict[str, str]:
    return {"objective": objective, "origin": origin, "run": f"runs/{name or objective}"}


def test_a_base_that_was_not_evaluated_is_not_guessed(tmp_path: Path) -> None:
    base = {"objective": "mle", "origin": "new", "run": "runs/pre"}
    models(tmp_path, base=(0.4, base), **{o: (0.9, trained(o, "runs/x/export")) for o in ("mle", "emo")})
    page, _, numbers = written(tmp_path)
    assert numbers["baseline"] == "mle" and "base" not in page.answer


def test_models_are_compared_with_the_models_they_were_trained_from(tmp_path: Path) -> None:
    """The default baselines are all earlier stages, and MLE from the same origin."""
    stages = {"base": 0.3, "cpt": (0.5, trained("emo", "models/base", "cpt"))}
    stages |= {o: (0.7, trained(o, "runs/cpt/export")) for o in ("mle", "emo")}
    other = {"big": 0.6, "big_mle": (0.9, trained("mle", "models/big", "b"))}
    models(tmp_path, **stages, **other)
    page, markdown, numbers = written(tmp_path)
    compared = {(c["baseline"], c["model"]) for c in numbers["mean_comparisons"]}
    assert compared == {("base", "cpt"), ("base", "mle"), ("base", "emo"), ("cpt", "mle"), ("cpt", "emo"),
                        ("mle", "emo"), ("big", "big_mle")}  # fmt: skip
    mean = next(c for c in numbers["mean_comparisons"] if (c["baseline"], c["model"]) == ("base", "mle"))
    limits = " to ".join(f"{100 * mean['interval'][key]:+.1f}" for key in ("low", "high"))
    row = next(row for row in page.table("Model", "Verdict") if row["Model"] == "mle against base")
    assert row["Points, 95 % interval"] == f"+40.0 ↑ {limits}, {p_value(mean['p'])}"
    assert f"+40.0 ↑ ({limits}" in markdown
    assert len(page.answer.split()) <= HEADLINE, "the sentences about other baselines are below"
    tasks = [row["Model"] for row in page.table("Task", "Model") if row["Task"] == "trec"]
    assert set(tasks) == {f"{model} against {baseline}" for baseline, model in compared}
    chosen = written(tmp_path, chosen=["mle"])[2]
    assert {c["baseline"] for c in chosen["mean_comparisons"]} == {"mle"} == {chosen["baseline"]}
    assert len(chosen["mean_comparisons"]) == 5


def test_a_baseline_of_several_kinds_is_compared_with_all(tmp_path: Path) -> None:
    """Here MLE is the origin of a model and the cross-entropy run next to another."""
    stages: dict[str, Any] = {o: (0.5, trained(o, "models/base")) for o in ("mle", "emo")}
    models(tmp_path, base=0.3, **stages, chat=(0.7, trained("mle", "runs/mle/export", "chats")))
    compared = {(c["baseline"], c["model"]) for c in written(tmp_path)[2]["mean_comparisons"]}
    assert {("base", "chat"), ("mle", "chat"), ("mle", "emo")} <= compared


def test_the_report_shows_text_errors_and_damaged_files(tmp_path: Path) -> None:
    """Sampled text is shown with or without scores of its model, but not if it is from other weights."""
    models(tmp_path, a=0.5, b=0.5)
    write_model(tmp_path, "unscored")
    write_result(tmp_path, "a", "sst2", [True, True, False, True])
    weights = {
        "a": store.digest_json("a"),
        "unscored": store.digest_json("unscored"),
        "b": "of another checkpoint",
    }
    for name, weight in weights.items():
        samples = [{"prefix": "", "text": f"{name} upon", "ended": False, "tokens": 3}]
        path = tmp_path / "models" / name / "samples.json"
        path.write_text(json.dumps({"weights": weight, "samples": samples}))
    key = read_models([tmp_path])[1].views["trec"]["key"]
    chunk = tmp_path / "store" / key / "chunks" / "00000.json"
    chunk.write_text(chunk.read_text()[:100])
    text = document(Report([tmp_path])).html()
    assert [f"{name} upon" in text for name in weights] == [True, True, False]
    assert "Data row 4: a, answered b" in text  # the id of the third row
    assert f"trec, b against a: {chunk.parent}" in text
