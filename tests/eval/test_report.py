"""The report of evaluated models and the comparison of two."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from emo.common.report.numbers import p_value
from emo.eval import store
from emo.eval.report.gather import Report
from emo.eval.report.page import document
from emo.eval.results import read_models
from tests.helpers.evaluating import command, tiny_model, write_tasks
from tests.helpers.html import Page
from tests.helpers.results import results_json, write_model, write_result

TASKS = "sst2,mmlu"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Results of two runs, one at two steps, with training logs and sampled text."""
    root = tmp_path_factory.mktemp("report")
    write_tasks(root / "data", TASKS.split(","), train=20, test=20)
    for objective, step in (("mle", 100), ("mle", 200), ("emo", 200)):
        run, name = root / "runs" / objective, f"{objective}-{step}"
        path = tiny_model(root / "models" / name, seed=step + len(objective) * (objective == "emo"))
        facts = {"step": step, "tokens": step * 4096, "objective": objective, "run": str(run)}
        (path / "export.json").write_text(json.dumps(facts))
        arguments = ["--model", path, "--name", name, "--output_path", root / "out"]
        assert command("eval", *arguments, "--tasks", TASKS, "--data", root / "data")[0] == 0
        prepared = root / "prepared" / objective / "train"
        for folder in (run, prepared):
            folder.mkdir(parents=True, exist_ok=True)
        record = json.dumps({"step": 8, "tokens": 8 * 4096, "nll": 5, "demd": 1, "loss": 1.0})
        (run / "metrics.jsonl").write_text(record + '\n{"step": 9, "tok')
        overlap = {"tasks": {"sst2": {"overlapping_rows": {"0": 0.5, "3": 1.0, "777": 1.0}}}}
        (prepared / "contamination.json").write_text(json.dumps(overlap))
        (run / "config.yaml").write_text(f"data: {{dir: {prepared.parent}}}\n")
    assert command("generate", *arguments, "--samples", 2, "--max_new_tokens", 12)[0] == 0
    return root


def test_the_report_of_real_evaluations(world: Path, tmp_path: Path) -> None:
    """Its sections, three formats with the same numbers, and the spread over seeds."""
    runs = [f"--run={o}-200={world / 'runs' / o}" for o in ("mle", "emo")]
    options = [*runs, "--notice", "Toy <b>.", "--seeds", "both=emo-200,mle-200"]
    code, out, _ = command("report", world / "out", "--output_path", f"{tmp_path}/", *options)
    assert code == 0 and "report of 3 models on 2 tasks" in out
    text, markdown = ((tmp_path / f"report.{kind}").read_text(encoding="utf-8") for kind in ("html", "md"))
    page, data = Page(text), results_json(tmp_path)
    assert "Toy &lt;b&gt;." in text and page.answer == data["answer"][0]
    assert [s for s in page.sections if not s.startswith("Difference")] == [
        "Accuracy", "Training", "Accuracy over training", "Details", "What the models write", "Confusion",
        "Worst mistakes", "Settings", "Made with"]  # fmt: skip
    names = ("mle-100", "mle-200", "emo-200")
    assert {(r["model"], r["task"]) for r in data["rows"]} == {
        (n, t) for n in names for t in TASKS.split(",")
    }
    for r in data["rows"]:
        assert {"chance", "n", "openicl_ppl", "suffix_sum", "suffix_mean"} <= set(r)
        texts = f"{100 * r['accuracy']:.1f}", f"{100 * r['low']:.1f} to {100 * r['high']:.1f}"
        assert all(number in text and number in markdown for number in texts)
    values = [r["accuracy"] for r in data["rows"] if r["task"] == "sst2" and r["model"].endswith("200")]
    assert data["seeds"]["both"]["sst2"] == pytest.approx([np.mean(values), np.std(values, ddof=1)])
    assert f"{100 * np.mean(values):.1f} ± {100 * np.std(values, ddof=1):.1f}" in markdown

    sst2 = {r["model"]: r for r in data["rows"] if r["task"] == "sst2"}
    assert sst2["mle-100"]["trained_on"] is None, "what is not known is not claimed to be none"
    assert sst2["emo-200"]["trained_on"] == 2, "rows 0 and 3, as data preparation says"
    records = next(m for m in read_models([world / "out"]) if m.name == "emo-200").records("sst2")
    rest = [r["prediction"] == r["gold"] for r in records if r["id"] not in (0, 3)]
    assert sst2["emo-200"]["untrained_accuracy"] == pytest.approx(np.mean(rest)) and len(rest) == 18


def test_a_regression_has_an_exit_code(world: Path) -> None:
    """Exit code 3, and 2 before any work when the baseline does not exist; `compare` shows the same."""
    means = {}
    for model in Report([world / "out"]).models:
        means[model.name] = np.mean([result["accuracy"] for result in model.results.values()])
    best, worst = max(means, key=means.__getitem__), min(means, key=means.__getitem__)
    rest = ["--data", world / "data", "--tasks", TASKS, "--output_path", world / "out", "--max_drop", 0.0]
    for name, baseline, expected in ((worst, best, 3), (best, worst, 0), (best, "nobody", 2)):
        arguments = ["--model", world / "models" / name, "--name", name, *rest]
        code, out, _ = command("eval", *arguments, "--fail_on_regression", baseline)
        assert code == expected and ("regression: " in out) == (code == 3)
    code, out, _ = command("compare", best, worst, "--results", world / "out")
    assert code == 0 and f"{worst} against {best} on 2 tasks" in out.splitlines()[-1]


# --- the page, from made-up rows --------------------------------------------------------------------------


def rows(share: float, n: int = 40) -> list[bool]:
    return [i < share * n for i in range(n)]


def written(out: Path, **options: Any) -> tuple[Page, str, dict[str, Any]]:
    """(page, Markdown, JSON) of a report on everything in `out`."""
    report = document(Report([out], **options))
    return Page(report.html()), report.markdown(), json.loads(report.json())


def models(out: Path, tasks: tuple[str, ...] = ("sst2", "trec"), **shares: Any) -> None:
    """Leave models by name: the share of right rows, or (share, facts)."""
    for name, value in shares.items():
        share, facts = value if isinstance(value, tuple) else (value, {})
        write_model(out, name, **facts)
        for task in tasks:
            write_result(out, name, task, rows(share))


def trained(objective: str, origin: str, name: str = "") -> dict[str, str]:
    return {"objective": objective, "origin": origin, "run": f"runs/{name or objective}"}


BASES = {  # how the base of a campaign was evaluated, and what its children call it -> whether it is found
    "another place": ({}, "elsewhere/base", True),
    "a run": ({"objective": "mle", "origin": "new", "run": "runs/pre"}, "runs/pre/export", True),
    "another run": ({"objective": "mle", "origin": "new", "run": "runs/pre"}, "runs/x/export", False),
}


@pytest.mark.parametrize("case", BASES)
def test_the_base_is_known(case: str, tmp_path: Path) -> None:
    """However it was trained; both objectives are compared with it."""
    facts, origin, found = BASES[case]
    models(tmp_path, emo=(0.9, trained("emo", origin)), base=(0.4, facts), mle=(0.9, trained("mle", origin)))
    page, markdown, numbers = written(tmp_path)
    assert numbers["baseline"] == ("base" if found else "mle")
    if not found:
        assert "base" not in page.answer and any("was not evaluated" in text for text in numbers["answer"])
        return
    mean = next(c for c in numbers["mean_comparisons"] if c["baseline"] == "base")
    limits = " to ".join(f"{100 * mean['interval'][key]:+.1f}" for key in ("low", "high"))
    row = next(row for row in page.table("Model", "Verdict", "Mean") if row["Model"].startswith("mle"))
    assert row["Mean"] == f"+50.0 ↑ {limits}, {p_value(mean['p'])}" and f"+50.0 ↑ ({limits}" in markdown
    assert [m["name"] for m in numbers["models"]] == ["base", "mle", "emo"], "as in the paper's tables"


def test_two_stages_and_two_bases(tmp_path: Path) -> None:
    """Every model is compared with each that it came from, and with MLE from the same origin; no others."""
    stages = {"base": 0.3, "cpt": (0.5, trained("emo", "models/base", "cpt"))}
    stages |= {o: (0.7, trained(o, "runs/cpt/export")) for o in ("mle", "emo")}
    other = {"big": 0.6, "big_mle": (0.9, trained("mle", "models/big", "b"))}
    models(tmp_path, **stages, **other)
    page, _, found = written(tmp_path)
    compared = {(c["baseline"], c["model"]) for c in found["mean_comparisons"]}
    assert compared == {("base", "cpt"), ("base", "mle"), ("base", "emo"), ("cpt", "mle"), ("cpt", "emo"),
                        ("mle", "emo"), ("big", "big_mle")}  # fmt: skip
    assert len(found["answer"]) == 2 and "base" in page.answer
    *_, chosen = written(tmp_path, chosen=["mle"])
    assert {c["baseline"] for c in chosen["mean_comparisons"]} == {"mle"} and chosen["baseline"] == "mle"
    assert len(chosen["mean_comparisons"]) == 5


def test_text_and_models_without_scores(tmp_path: Path) -> None:
    """Text is shown under the name of its model, scored or not; that of other weights nowhere."""
    models(tmp_path, tasks=("sst2",), EMO=0.5, other=0.5)
    write_model(tmp_path, "unscored")
    weights = {name: store.digest(name) for name in ("EMO", "unscored")} | {"other": "of another checkpoint"}
    for name, digest in weights.items():
        samples = [{"prefix": "", "text": f"{name} upon", "ended": False, "tokens": 3}]
        path = tmp_path / "models" / name / "samples.json"
        path.write_text(json.dumps({"weights": digest, "samples": samples}))
    report = document(Report([tmp_path]))
    assert [f"{name} upon" in report.html() for name in weights] == [True, True, False]
    assert [m["name"] for m in report.data["models"]] == ["EMO", "other", "unscored"]


def test_mistakes_and_damage_are_shown(tmp_path: Path) -> None:
    """Of mistakes row, unit and demonstrations; what the comparison cannot read is named."""
    models(tmp_path, a=0.5, b=0.5)
    write_result(tmp_path, "a", "sst2", [True, True, False, True])
    key = read_models([tmp_path])[1].views["trec"]["key"]
    chunk = tmp_path / "store" / key / "chunks" / "00000.json"
    chunk.write_text(chunk.read_text()[:100])
    text = document(Report([tmp_path])).html()
    assert "Data row 4: a, answered b" in text  # the third of every second row
    assert "nats per token of the whole prompt" in text and "Demonstrations" in text
    assert f"b, trec: {chunk.parent}" in text
