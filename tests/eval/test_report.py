"""The report, the comparison and the sampled text."""

from __future__ import annotations

import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.errors import UserError
from eval.compare import Model, regression, table
from eval.report import plots
from eval.report.gather import gather, write
from tests.helpers.evaluating import command, tiny_model, write_tasks

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
        lines.append({"step": 8, "tokens": 8 * 4096, "validation_nll": 1.0, "validation_demd": 0.2})
        (run / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines) + '{"step": 9, "tok')
        prepared = root / "prepared" / objective
        (prepared / "train").mkdir(parents=True)
        overlap = {"tasks": {"sst2": {"overlapping_rows": {"0": 0.5, "3": 1.0, "777": 1.0}}}}
        (prepared / "train" / "contamination.json").write_text(json.dumps(overlap))
        (run / "config.yaml").write_text(f"data: {{dir: {prepared}}}\n")
    yield root
    del os.environ["EVAL_CACHE"]


class Page(HTMLParser):
    """Tags that are open, text, addresses."""

    VOID = {"meta", "br", "link", "img", "path", "use", "rect"}

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.ids: list[str] = []
        self.feed(text)
        assert not self.open, f"unclosed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "data"):
                self.addresses.append(value or "")
            if name == "id":
                self.ids.append(value or "")
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag, f"</{tag}> closes something else"


def test_the_page_stands_alone(world: Path, tmp_path: Path) -> None:
    runs = [f"--run={o}-200={world / 'runs' / o}" for o in ("mle", "emo")]
    notice = "Toy tasks <b>& more</b>."
    code, out, _ = command("report", world / "out", "--out", tmp_path, *runs, "--notice", notice)
    assert code == 0 and "report of 4 models on 2 tasks" in out
    text = (tmp_path / "report.html").read_text()
    page = Page(text)
    assert all(a.startswith("#") for a in page.addresses), "an address outside the file"
    assert not {"script", "link", "iframe", "img"} & set(page.tags)
    assert "@import" not in text and "url(http" not in text
    assert len(set(page.ids)) == len(page.ids), "one id twice: figures would take each other's parts"
    assert "Toy tasks &lt;b&gt;&amp; more&lt;/b&gt;." in text
    for stand_in in plots._VARIABLES:
        assert stand_in not in text
    for heading in ("Accuracy", "Scores side by side", "Training", "Accuracy over training",
                    "What the models write", "Confusion", "Worst mistakes", "Made with"):  # fmt: skip
        assert f"<h2>{heading}</h2>" in text, heading
    assert text.count("<svg") == 3


def test_the_three_formats_agree(world: Path, tmp_path: Path) -> None:
    write(gather([world / "out"], {}), tmp_path)
    found = json.loads((tmp_path / "results.json").read_text())
    assert {(r["model"], r["task"]) for r in found["rows"]} == {
        (f"{o}-{s}", t) for o in ("mle", "emo") for s in (100, 200) for t in TASKS.split(",")
    }
    html, md = (tmp_path / "report.html").read_text(), (tmp_path / "report.md").read_text()
    for row in found["rows"]:
        assert {"accuracy", "chance", "n", "low", "high", "openicl_ppl", "suffix_sum", "suffix_mean"} <= set(
            row
        )
        assert row["low"] <= row["accuracy"] <= row["high"]
        shown = f"{100 * row['accuracy']:.1f}"
        assert shown in html and shown in md
    view = json.loads((world / "out" / "models" / "emo-200" / "sst2.json").read_text())
    row = next(r for r in found["rows"] if (r["model"], r["task"]) == ("emo-200", "sst2"))
    assert row["accuracy"] == view["result"]["accuracy"] and row["step"] == 200


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "no results in nowhere"),
        (["OUT", "--baseline", "x"], "no results of a model 'x'; there are: emo-100"),
        (["OUT", "--run", "emo-200"], "must read NAME=VALUE"),
        (["OUT", "--run", "emo-200=nowhere"], "nowhere does not exist"),
        (["OUT", "--seeds", "emo=a,b"], "no results of a model 'a'"),
        (["OUT", "OUT"], "stands in two directories"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], message: str, world: Path, tmp_path: Path) -> None:
    given = [str(world / "out") if a == "OUT" else a for a in arguments]
    code, _, err = command("report", *given, "--out", tmp_path / "r")
    assert code == 2 and message in err and err.count("\n") == 1
    assert not (tmp_path / "r").exists()


# --- comparison -------------------------------------------------------------------------------------------


def fabricated(root: Path, name: str, right: dict[str, list[bool]]) -> Model:
    """A model whose rows are right or wrong as given."""
    results, keys = {}, {}
    for task, rows in right.items():
        records = [
            {"row": i, "gold": "a", "group": "", "prediction": "a" if ok else "b"}
            for i, ok in enumerate(rows)
        ]
        chunk = root / "store" / f"{name}-{task}" / "chunks" / "00000.json"
        chunk.parent.mkdir(parents=True)
        chunk.write_text(json.dumps(records))
        results[task] = {"title": task, "n": len(rows), "accuracy": float(np.mean(rows)), "groups": {}}
        keys[task] = f"{name}-{task}"
    return Model(name, {"facts": {}}, results, keys, root)


def test_a_clear_regression_is_one(tmp_path: Path) -> None:
    good = fabricated(tmp_path, "good", {"sst2": [True] * 80 + [False] * 20, "trec": [True] * 50})
    bad = fabricated(tmp_path, "bad", {"sst2": [True] * 60 + [False] * 40, "trec": [True] * 50})
    verdict = regression(good, bad)
    assert verdict.regressions and "sst2 -20.0 points" in verdict.summary
    assert not regression(bad, good).regressions  # better is no regression
    assert not regression(good, good).regressions
    assert "-20.0" in table(good, bad) and "*" in table(good, bad).splitlines()[2]


def test_noise_is_no_regression_unless_a_drop_is_forbidden(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    a = rng.random(100) < 0.7
    b = a.copy()
    b[:6], b[6:10] = ~b[:6], ~b[6:10]
    first = fabricated(tmp_path, "a", {"sst2": a.tolist()})
    second = fabricated(tmp_path, "b", {"sst2": b.tolist()})
    drop = 100 * (a.mean() - b.mean())
    worse = (first, second) if drop > 0 else (second, first)
    assert not regression(*worse).regressions
    assert regression(*worse, max_drop=abs(drop) - 0.1).regressions
    assert not regression(*worse, max_drop=abs(drop) + 0.1).regressions


def test_other_rows_cannot_be_compared(tmp_path: Path) -> None:
    a = fabricated(tmp_path, "a", {"sst2": [True] * 10})
    with pytest.raises(UserError, match="were not asked the same rows"):
        regression(a, fabricated(tmp_path, "b", {"sst2": [True] * 11}))
    with pytest.raises(UserError, match="no task in common"):
        regression(a, fabricated(tmp_path, "c", {"trec": [True] * 10}))


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
