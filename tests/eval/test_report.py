"""The report, the comparison and the sampled text."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.report import numbers
from eval.report.gather import gather
from eval.report.page import document
from eval.results import read_models
from tests.helpers.evaluating import command, tiny_model, write_tasks
from tests.helpers.html import Page
from tests.helpers.results import results_json, write_model, write_result
from tests.helpers.said import lines

TASKS = "sst2,mmlu"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Results of two runs at two steps each, with training logs and sampled text."""
    root = tmp_path_factory.mktemp("report")
    os.environ["EVAL_CACHE"] = str(root / "cache")
    write_tasks(root / "data", TASKS.split(","), train=20, test=20)
    for objective in ("mle", "emo"):
        run = root / "runs" / objective
        for step in (100, 200):
            path = tiny_model(
                root / "models" / f"{objective}-{step}", seed=step + len(objective) * (objective == "emo")
            )
            facts = {"step": step, "tokens": step * 4096, "objective": objective, "run": str(run)}
            (path / "export.json").write_text(json.dumps(facts))
            arguments = ["--model", path, "--name", f"{objective}-{step}", "--out", root / "out"]
            assert command("run", *arguments, "--tasks", TASKS, "--data", root / "data")[0] == 0
        assert command("generate", *arguments, "--samples", 2, "--tokens", 12)[0] == 0
        run.mkdir(parents=True)
        lines = [
            {"step": s, "tokens": s * 4096, "nll": 5 / s, "demd": 1 / s, "loss": 1.0} for s in range(1, 9)
        ]
        lines.append(
            {
                "step": 8,
                "tokens": 8 * 4096,
                "set": "validation",
                "validation_nll": 1.0,
                "validation_demd": 0.2,
            }
        )
        (run / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines) + '{"step": 9, "tok')
        prepared = root / "prepared" / objective
        (prepared / "train").mkdir(parents=True)
        overlap = {"tasks": {"sst2": {"overlapping_rows": {"0": 0.5, "3": 1.0, "777": 1.0}}}}
        (prepared / "train" / "contamination.json").write_text(json.dumps(overlap))
        (run / "config.yaml").write_text(f"data: {{dir: {prepared}}}\n")
    yield root
    del os.environ["EVAL_CACHE"]


def test_the_report_of_real_evaluations(world: Path, tmp_path: Path) -> None:
    """Its sections, and three formats with the same numbers."""
    runs = [f"--run={o}-200={world / 'runs' / o}" for o in ("mle", "emo")]
    code, out, _ = command("report", world / "out", "--out", f"{tmp_path}/", *runs, "--notice", "Toy <b>.")
    assert code == 0 and "report of 4 models on 2 tasks" in out
    text, markdown = ((tmp_path / f"report.{kind}").read_text(encoding="utf-8") for kind in ("html", "md"))
    page, found = Page(text), results_json(tmp_path)
    assert "Toy &lt;b&gt;." in text and page.answer == found["answer"][0]
    assert [s for s in page.sections if not s.startswith("Difference")] == [
        "Accuracy", "Training", "Accuracy over training", "Details", "What the models write", "Confusion",
        "Worst mistakes", "Settings", "Made with"]  # fmt: skip
    assert {(r["model"], r["task"]) for r in found["rows"]} == {
        (f"{o}-{s}", t) for o in ("mle", "emo") for s in (100, 200) for t in TASKS.split(",")
    }
    for r in found["rows"]:
        assert {"chance", "n", "openicl_ppl", "suffix_sum", "suffix_mean"} <= set(r)
        shown = f"{100 * r['accuracy']:.1f}", f"{100 * r['low']:.1f} to {100 * r['high']:.1f}"
        assert all(number in text and number in markdown for number in shown)


def test_rows_of_the_training_text_are_set_aside(world: Path) -> None:
    """Data preparation found test rows 0 and 3 in the training text."""
    report = gather([world / "out"], {"emo-200": world / "runs" / "emo"})
    row = report.row("emo-200", "sst2")
    assert row is not None and row["trained_on"] == 2
    records = next(m for m in report.models if m.name == "emo-200").records("sst2")
    rest = [r["prediction"] == r["gold"] for r in records if r["id"] not in (0, 3)]
    assert row["untrained_accuracy"] == pytest.approx(np.mean(rest)) and len(rest) == 18
    other = report.row("mle-200", "sst2")
    assert other is not None and other["trained_on"] is None  # not known: not claimed to be none


def test_seeds_are_aggregated(world: Path, tmp_path: Path) -> None:
    code, _, _ = command("report", world / "out", "--out", tmp_path, "--seeds", "emo=emo-100,emo-200")
    assert code == 0
    found = json.loads((tmp_path / "results.json").read_text())
    values = [r["accuracy"] for r in found["rows"] if r["task"] == "sst2" and r["model"].startswith("emo")]
    assert found["seeds"]["emo"]["sst2"] == pytest.approx([np.mean(values), np.std(values, ddof=1)])
    assert (
        f"{100 * np.mean(values):.1f} ± {100 * np.std(values, ddof=1):.1f}"
        in (tmp_path / "report.md").read_text()
    )


MISTAKES = (
    ["nowhere"],
    ["OUT", "--baseline", "x"],
    ["OUT", "--run", "emo-200"],
    ["OUT", "--run", "emo-200=nowhere"],
    ["OUT", "--seeds", "emo=a,b"],
    ["OUT", "OUT"],
    ["OUT", "--out", "x.pdf"],
)


@pytest.mark.parametrize("arguments", MISTAKES)
def test_mistakes_are_one_line(arguments: list[str], world: Path, tmp_path: Path) -> None:
    given = [str(world / "out") if a == "OUT" else a for a in arguments]
    code, _, err = command("report", "--out", tmp_path / "r", *given)
    assert code == 2 and len(lines(err)) == 1 and not (tmp_path / "r").exists()


# --- the page, from made-up rows --------------------------------------------------------------------------


def rows(share: float, n: int = 40) -> list[bool]:
    return [i < share * n for i in range(n)]


def written(out: Path, **options: Any) -> tuple[Page, str, dict[str, Any]]:
    """(page, Markdown, JSON) of a report on everything in `out`."""
    report = document(gather([out], {}, **options))
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
    "a directory": ({}, "models/base", True),
    "an absolute path": ({}, "/data/models/base", True),
    "another place": ({}, "elsewhere/base", True),
    "a run": ({"objective": "mle", "origin": "new", "run": "runs/pre"}, "runs/pre/export", True),
    "a checkpoint": ({"objective": "mle", "origin": "new", "run": "runs/pre"}, "runs/pre/hf", True),
    "another model": ({}, "models/other", False),
    "another run": ({"objective": "mle", "origin": "new", "run": "runs/pre"}, "runs/x/export", False),
}


@pytest.mark.parametrize("case", BASES)
def test_the_base_is_known(case: str, tmp_path: Path) -> None:
    """However it was trained, and whatever curves are shown; both objectives are compared with it."""
    facts, origin, found = BASES[case]
    models(tmp_path, emo=(0.9, trained("emo", origin)), base=(0.4, facts), mle=(0.9, trained("mle", origin)))
    page, markdown, numbers = written(tmp_path)
    assert numbers["baseline"] == ("base" if found else "mle")
    if found:
        assert "Compared with base on 2 tasks, mle improves by 50.0 points" in page.answer
        assert "emo and mle do not differ measurably: 0.0 points" in page.answer
        assert "base (base model" in markdown and markdown.startswith(f"# {page.answer[:30]}")
        assert [m["name"] for m in numbers["models"]] == ["base", "mle", "emo"], "as in the paper's tables"
    else:
        assert "base" not in page.answer and any("was not evaluated" in text for text in numbers["answer"])


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
    assert len(found["answer"]) == 2 and "Compared with big" in found["answer"][1] and "base" in page.answer
    *_, chosen = written(tmp_path, chosen=["mle"])
    assert {c["baseline"] for c in chosen["mean_comparisons"]} == {"mle"} and chosen["baseline"] == "mle"
    assert len(chosen["mean_comparisons"]) == 5


@pytest.mark.parametrize(
    ("share", "said", "verdict"),
    [(0.9, "b improves by 40.0 points", "better"), (0.1, "b gets worse by 40.0 points", "worse"),
     (0.5, "b shows no clear change (0.0 points", "no clear difference")],
)  # fmt: skip
def test_the_first_line_is_the_answer(share: float, said: str, verdict: str, tmp_path: Path) -> None:
    models(tmp_path, a=0.5, b=share)
    page, markdown, found = written(tmp_path)
    assert said in page.answer and "95 % interval" in page.answer
    (row,) = page.table("Model", "Verdict", "Mean")
    (mean,) = found["mean_comparisons"]
    assert row["Verdict"].startswith(verdict) and mean["direction"] == {"b": 1, "w": -1, "n": 0}[verdict[0]]
    low, high = (numbers.points(mean["interval"][key]) for key in ("low", "high"))
    assert f"{low} to {high}, {numbers.p_value(mean['p'])}" in row["Mean"]
    assert f"{low} to {high}" in markdown
    if verdict == "better":
        assert row["Verdict"].endswith("2 tasks better") and row["Mean"].startswith("+40.0 ↑")


def test_thirty_models_stay_readable(tmp_path: Path) -> None:
    models(
        tmp_path, base=0.5, **{f"m{i}": (i / 30, trained("emo", "models/base", str(i))) for i in range(29)}
    )
    page, *_ = written(tmp_path)
    assert "improve" in page.answer and "of 29" in page.answer and len(page.answer) < 300
    assert page.tags.count("details") > 2, "pictures of each task are folded"


def test_without_anything_to_compare_there_are_levels(tmp_path: Path) -> None:
    """100 per cent is not known to be 100 per cent."""
    models(tmp_path, ("sst2",), a=1.0)
    page, _, found = written(tmp_path)
    (row,) = found["rows"]
    assert row["low"] == pytest.approx(0.912, abs=1e-3) and row["high"] == 1
    assert page.answer == "a: accuracy 100.0 % on 1 task (95 % interval 91.2 to 100.0); chance is 50.0 %."


def scored(out: Path, name: str, **facts: Any) -> Path:
    """Description of a model with a score."""
    directory = write_model(out, name, **facts)
    write_result(out, name, "sst2", rows(0.5))
    return directory / "model.json"


def change(path: Path, /, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | values), encoding="utf-8")


def sampled(directory: Path, text: str) -> None:
    weights = json.loads((directory / "model.json").read_text())["weights"]
    samples = [{"prefix": "", "text": text, "ended": False, "tokens": 3}]
    (directory / "samples.json").write_text(json.dumps({"weights": weights, "samples": samples}))


def logged(run: Path) -> Path:
    """A run directory with a training log."""
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"step": 1, "tokens": 9, "nll": 1.0}\n')
    return run


def test_models_without_scores_are_in_no_table(tmp_path: Path) -> None:
    """Their text is shown; under the name of the same weights that have scores, where there are some."""
    weights = json.loads(scored(tmp_path, "EMO").read_text())["weights"]
    directory = write_model(tmp_path, "mine")
    change(directory / "model.json", weights=weights)
    sampled(directory, "once upon")
    sampled(write_model(tmp_path, "unscored"), "twice upon")
    report = document(gather([tmp_path], {}))
    page, markdown = report.html(), report.markdown()
    assert "mine" not in page and "mine" not in markdown
    assert (
        "| unscored | " not in markdown.split("## Made with")[0]
        and "once upon" in page
        and "twice upon" in page
    )
    assert [m["name"] for m in report.data["models"]] == ["EMO", "unscored"]


def test_curves_of_another_run_are_remarked(tmp_path: Path) -> None:
    """Not those of a renamed run: export and configuration agree on where it began."""
    described, run = scored(tmp_path, "EMO", run="runs/mine-f32", objective="emo"), logged(tmp_path / "mine")
    (run / "config.yaml").write_text("run_dir: runs/mine\n")
    code, _, err = command("report", tmp_path, f"--run=EMO={run}")
    said = f"--run EMO={run}: "
    assert code == 0 and said in err and said in (tmp_path / "report.html").read_text()
    assert "--run EMO" in (tmp_path / "report.md").read_text()
    (run / "config.yaml").write_text("run_dir: runs/mine-f32\n")
    assert gather([tmp_path], {"EMO": run}).remarks == []
    (run / "config.yaml").unlink()
    assert len(gather([tmp_path], {"EMO": run}).remarks) == 1
    change(described, path=f"{run}/export")
    assert gather([tmp_path], {"EMO": run}).remarks == []


def test_one_answer_to_everything_is_remarked(tmp_path: Path) -> None:
    view = scored(tmp_path, "EMO").with_name("sst2.json")
    result = json.loads(view.read_text())["result"]
    for confusion, remarks in (
        ([[16, 0], [24, 0]], ["sst2: EMO answers a only, whatever the row"]),
        ([[40, 0], [0, 0]], []),  # it is the only right one
        ([[16, 0], [23, 1]], []),
    ):
        change(view, result=result | {"confusion": confusion})
        assert gather([tmp_path], {}).remarks == remarks


def test_mistakes_say_row_unit_and_heading(tmp_path: Path) -> None:
    write_model(tmp_path, "a")
    write_result(tmp_path, "a", "sst2", [True, True, False, True])
    text = document(gather([tmp_path], {})).html()
    assert "Data row 4: a, answered b" in text  # the third of every second row
    assert "nats per token of the whole prompt" in text and "Demonstrations" in text


def test_what_cannot_be_compared_is_said(tmp_path: Path) -> None:
    """No marks, no p-values and no mean over tasks of other prompts; every model's settings."""
    for name, prompt in (("a", "x"), ("b", "y")):
        write_model(tmp_path, name)
        write_result(tmp_path, name, "sst2", rows(0.5 if name == "a" else 1))
        write_result(tmp_path, name, "trec", rows(0.5), prompt=prompt, shots=len(prompt))
    page, markdown, found = written(tmp_path)
    assert [c["task"] for c in found["comparisons"]] == ["sst2"]
    assert [(c["task"], c["reason"]) for c in found["not_compared"]] == [("trec", "other prompts")]
    assert "- b, trec: other prompts" in markdown and "on 1 task" in page.answer
    (row,) = page.table("Model", "Verdict")
    assert row["trec"] == row["Mean"] == "not comparable"
    assert [(r["Task"], r["Models"]) for r in page.table("Task", "Models")] == [
        ("sst2", "a, b"), ("trec", "a"), ("trec", "b")]  # fmt: skip


HOSTILE = '</td><script>alert("1")</script>|`*_[x](http://x)_*` $a$ \x1b[31m\u202e &amp;\n# x'


def test_text_from_data_does_nothing(tmp_path: Path) -> None:
    """Names, titles, labels, texts, facts and samples are escaped wherever they are shown."""
    for name in ("a", "b"):
        directory = write_model(tmp_path, name, objective=HOSTILE, origin=HOSTILE, run=HOSTILE, step=1)
        for task in ("sst2", "trec"):
            options: dict[str, Any] = {"title": HOSTILE, "labels": ["a" + HOSTILE, "b"], "text": HOSTILE}
            write_result(tmp_path, name, task, rows(0.5), **options)
        sampled(directory, HOSTILE)
    report = document(gather([tmp_path], {}, title=HOSTILE, notice=HOSTILE, seeds={HOSTILE: ["a", "b"]}))
    page, markdown = report.html(), report.markdown()
    Page(page)
    assert "<script" not in page and "\x1b" not in page + markdown and "\u202e" not in page
    assert "<" not in markdown and markdown.count("\n# ") == 0


def test_a_damaged_store_leaves_a_report(tmp_path: Path) -> None:
    """What the comparison cannot read is named; the rest is shown."""
    models(tmp_path, a=0.5, b=0.5)
    key = read_models([tmp_path])[1].keys["trec"]
    chunk = tmp_path / "store" / key / "chunks" / "00000.json"
    chunk.write_text(chunk.read_text()[:100])
    assert f"b, trec: {chunk}" in document(gather([tmp_path], {})).html()


# --- comparison -------------------------------------------------------------------------------------------


def test_the_compare_command(world: Path) -> None:
    code, out, _ = command("compare", "mle-200", "emo-200", "--results", world / "out")
    assert code == 0
    lines = out.splitlines()
    assert lines[0].split()[:4] == ["task", "n", "mle-200", "emo-200"]
    assert (
        any(line.startswith("mean") for line in lines) and "emo-200 against mle-200 on 2 tasks" in lines[-1]
    )
    assert command("compare", "mle-200", "x", "--results", world / "out")[0] == 2


def test_run_fails_on_a_regression(world: Path, tmp_path: Path) -> None:
    """Exit code 3, and 2 before any work when the baseline does not exist."""
    arguments = ["--data", world / "data", "--tasks", TASKS, "--out", tmp_path]
    means = {}
    for name in ("mle-100", "mle-200", "emo-200"):
        _, out, _ = command("run", "--model", world / "models" / name, *arguments)
        found = re.search(r"mean accuracy ([\d.]+)", out)
        assert found is not None
        means[name] = float(found.group(1))
    best, worst = max(means, key=means.__getitem__), min(means, key=means.__getitem__)
    assert means[best] > means[worst]
    check = [*arguments, "--max-drop", 0.0, "--fail-on-regression"]
    code, out, _ = command("run", "--model", world / "models" / worst, *check, best)
    assert code == 3 and "regression: " in out.splitlines()[-1]
    assert command("run", "--model", world / "models" / best, *check, worst)[0] == 0
    assert command("run", "--model", world / "models" / best, *check, "nobody")[0] == 2


# --- sampled text -----------------------------------------------------------------------------------------


def test_samples_of_other_weights_are_not_shown(world: Path, tmp_path: Path) -> None:
    for name in ("emo-100", "emo-200"):
        arguments = ["--model", world / "models" / name, "--name", "m", "--out", tmp_path]
        command("run", *arguments, "--tasks", "sst2", "--data", world / "data")
        if name == "emo-100":
            command("generate", *arguments, "--samples", 1, "--tokens", 3)
    report = gather([tmp_path], {})
    assert report.models[0].samples == []
