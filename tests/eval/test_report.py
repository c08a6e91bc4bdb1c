"""The report, the comparison and the sampled text."""

from __future__ import annotations

import html
import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.page import figures, parts
from eval.report import numbers
from eval.report.gather import gather
from eval.report.write import write
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
    for stand_in in figures._VARIABLES:
        assert stand_in not in text
    for heading in ("Accuracy", "Scores side by side", "Training", "Accuracy over training",
                    "What the models write", "Confusion", "Worst mistakes", "Made with"):  # fmt: skip
        assert f"<h2>{heading}</h2>" in text, heading
    assert text.count("<svg") == 8  # each for two widths of the screen


def test_the_three_formats_agree(world: Path, tmp_path: Path) -> None:
    write(gather([world / "out"], {}), tmp_path)
    found = json.loads((tmp_path / "results.json").read_text())
    assert {(r["model"], r["task"]) for r in found["rows"]} == {
        (f"{o}-{s}", t) for o in ("mle", "emo") for s in (100, 200) for t in TASKS.split(",")
    }
    page, md = (tmp_path / "report.html").read_text(), (tmp_path / "report.md").read_text()
    for row in found["rows"]:
        assert {"accuracy", "chance", "n", "low", "high", "openicl_ppl", "suffix_sum", "suffix_mean"} <= set(
            row
        )
        assert row["low"] <= row["accuracy"] <= row["high"]
        shown = f"{100 * row['accuracy']:.1f}"
        assert shown in page and shown in md
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
        (["OUT", "--baseline", "x"], "no results of a model 'x'; known: emo-100"),
        (["OUT", "--run", "emo-200"], "must read NAME=VALUE"),
        (["OUT", "--run", "emo-200=nowhere"], "nowhere does not exist"),
        (["OUT", "--seeds", "emo=a,b"], "no results of a model 'a'"),
        (["OUT", "OUT"], "two directories hold a model"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], message: str, world: Path, tmp_path: Path) -> None:
    given = [str(world / "out") if a == "OUT" else a for a in arguments]
    code, _, err = command("report", *given, "--out", tmp_path / "r")
    assert code == 2 and message in err and len(lines(err)) == 1
    assert not (tmp_path / "r").exists()


# --- the page, from made-up rows --------------------------------------------------------------------------


def rows(share: float, n: int = 40) -> list[bool]:
    return [i < share * n for i in range(n)]


def written(out: Path, **options: Any) -> tuple[str, str, dict[str, Any]]:
    """(HTML, Markdown, JSON) of a report on everything in `out`."""
    write(gather([out], {}, **options), out)
    page, markdown = (out / "report.html").read_text(), (out / "report.md").read_text()
    Page(page)
    return page, markdown, results_json(out)


def ten_models(out: Path, tasks: tuple[str, ...] = ("sst2", "trec")) -> None:
    for base in ("llama-7b", "llama-13b"):
        for i, objective in enumerate((None, "emo", "mixce", "tailr", "mle")):
            name = f"{base}-{objective}" if objective else base
            facts = {"origin": f"models/{base}", "objective": objective, "step": 9} if objective else {}
            write_model(out, name, **facts)
            for task in tasks:
                write_result(out, name, task, rows(0.4 + 0.1 * i))


def test_rows_are_base_model_by_objective(tmp_path: Path) -> None:
    """defects E: as in the paper's tables, the baseline first and marked."""
    ten_models(tmp_path)
    page, markdown, found = written(tmp_path)
    accuracy = page[page.index("<h2>Accuracy</h2>") : page.index("<figure", page.index("</table>"))]
    order = re.findall(r'colspan="4" scope="colgroup">([^<]*)<|class="method">([^<]*)<', accuracy)
    objectives = ["Pre-trained", "MLE", "TaiLr", "MixCE", "EMO"]
    assert [a or b for a, b in order] == ["llama-7b", *objectives, "llama-13b", *objectives]
    assert accuracy.count(">baseline<") == 1
    assert accuracy.index(">baseline<") < accuracy.index("MLE")
    assert found["baseline"] == "llama-7b" and "Pre-trained (llama-7b), baseline" in markdown
    other, *_ = written(tmp_path, baselines=["llama-13b-mle"])
    first = re.search(r'class="method">([^<]*)</span><span class="pill">baseline', other)
    assert first is not None and first.group(1) == "MLE"
    assert other.index('colgroup">llama-13b<') < other.index('colgroup">llama-7b<')


def test_ten_models_have_ten_colours_and_room(tmp_path: Path) -> None:
    """defects E: colours repeated after six, and a legend in one row squeezed the figure to a sixth."""
    ten_models(tmp_path)
    page, *_ = written(tmp_path)
    styles = {(figures.css_colour(i), figures.marker(i)) for i in range(133)}
    assert len(styles) == 133 and len({figures.css_colour(i) for i in range(12)}) == 12
    assert figures.css_colour(0) not in {figures.css_colour(i) for i in range(1, 133)}, "the baseline's"
    assert len(set(re.findall(r'class="chip" style="background:var\((--s\d+)\)', page))) == 10
    style = parts.STYLE.read_text()
    for i in range(12):
        assert style.count(f"--s{i + 1}:") == 2  # light and dark
    wide = re.search(r'<svg role="img"[^>]* width="([\d.]+)pt"', page)
    assert wide is not None and float(wide.group(1)) == pytest.approx(72 * figures.WIDE, rel=0.12)
    panel = re.search(r'<g id="accuracy-wide-patch_2">\s*<path d="M ([\d.]+) [\d.]+ \s*L ([\d.]+)', page)
    assert panel is not None and float(panel.group(2)) - float(panel.group(1)) > 130  # points
    names = re.findall(r">(llama-[^<]*)</text>", page)
    assert len(set(names)) == 10


def test_what_the_tests_say_is_on_the_page(tmp_path: Path) -> None:
    """defects E: p-values, and for the mean an interval and a test."""
    for name, share in (("a", 0.5), ("b", 0.9)):
        write_model(tmp_path, name)
        for task in ("sst2", "trec"):
            write_result(tmp_path, name, task, rows(share))
    page, markdown, found = written(tmp_path)
    assert "<h2>Difference from a</h2>" in page
    (mean,) = found["mean_comparisons"]
    assert mean["difference"] == pytest.approx(0.4) and mean["p"] < 0.001 and mean["direction"] == 1
    assert mean["interval"]["low"] > 0.2
    shown = page[page.index("<h2>Difference") :]
    assert shown.count("p &lt; 0.001") == 3 and shown.count("+40.0") >= 3  # two tasks and the mean
    assert '<span class="up">2 gained</span>' in shown and "lost</span>" not in shown
    changes = shown[shown.index('aria-label="Gained and lost"') : shown.index("</svg>")]
    assert re.findall(r">(Mean|sst2|trec)</text>", changes) == ["Mean", "sst2", "trec"]
    (model,) = (m for m in found["models"] if m["name"] == "b")
    assert model["mean_low"] < 0.89 and model["mean_high"] > 0.91
    assert model["mean_accuracy"] == pytest.approx(0.9)
    assert numbers.span(model["mean_low"], model["mean_high"]) in page
    assert "| b | mean | +40.0 |" in markdown and "| b | sst2 | +40.0 |" in markdown


def test_a_second_baseline_has_a_table_of_its_own(tmp_path: Path) -> None:
    """Rows and marks of accuracy follow the first one only."""
    for name, share in (("a", 0.4), ("b", 0.9), ("c", 0.8)):
        write_model(tmp_path, name)
        for task in ("sst2", "trec"):
            write_result(tmp_path, name, task, rows(share))
    page, markdown, found = written(tmp_path, baselines=["a", "b"])
    assert [m["baseline"] for m in found["mean_comparisons"]] == ["a", "a", "b", "b"]
    means = {(m["baseline"], m["model"]): m for m in found["mean_comparisons"]}
    assert means["a", "c"]["difference"] == pytest.approx(0.4) and means["a", "c"]["direction"] == 1
    assert means["b", "c"]["difference"] == pytest.approx(-0.1)
    assert found["baseline"] == "a" and "a, baseline" in markdown and "b, baseline" not in markdown
    accuracy, against_a, against_b, *_ = page.split("<h2>")[1:]
    assert against_a.startswith("Difference from a<") and against_b.startswith("Difference from b<")
    assert accuracy.count("baseline</span>") == against_b.count("baseline</span>") == 1
    assert "+40.0" in against_a and "-10.0" in against_b.replace(numbers.MINUS, "-")
    assert markdown.index("## Difference from a") < markdown.index("## Difference from b")


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
    page, markdown, found = written(tmp_path)
    assert "1 model, 1 task" in page and "mine" not in page and "mine" not in markdown
    tables, texts = page.split("<h2>What the models write")
    assert "unscored" not in tables and "unscored" not in markdown
    assert "once upon" in texts and "twice upon" in texts
    assert [m["name"] for m in found["models"]] == ["EMO", "unscored"]
    code, out, _ = command("report", tmp_path)
    assert code == 0 and "report of 1 model on 1 task:" in out and "--baseline" not in out


def test_the_baseline_is_the_base_model_whatever_curves_are_shown(tmp_path: Path) -> None:
    scored(tmp_path, "BASE")
    for objective in ("mle", "emo"):
        scored(tmp_path, objective.upper(), origin="models/BASE", objective=objective, run=f"r/{objective}")
    given = [f"--run={o.upper()}={logged(tmp_path / o)}" for o in ("emo", "mle")]
    code, out, err = command("report", tmp_path, *given)
    assert code == 0 and "of another run" not in err
    assert "changes are against BASE (--baseline NAME for another: EMO, MLE)" in out
    assert "Another baseline: --baseline NAME (EMO, MLE)." in (tmp_path / "report.html").read_text()
    assert "changes are against" not in command("report", tmp_path, "--baseline", "MLE")[1]


def test_curves_of_another_run_are_remarked(tmp_path: Path) -> None:
    """Not those of a renamed run: export and configuration agree on where it began."""
    described, run = scored(tmp_path, "EMO", run="runs/mine-f32", objective="emo"), logged(tmp_path / "mine")
    (run / "config.yaml").write_text("run_dir: runs/mine\n")
    code, _, err = command("report", tmp_path, f"--run=EMO={run}")
    said = f"--run EMO={run}: EMO seems to be of another run (runs/mine-f32)"
    assert code == 0 and said in err and said in (tmp_path / "report.html").read_text()
    assert "of another run" in (tmp_path / "report.md").read_text()
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


def test_all_right_is_not_known_to_be_all_right(tmp_path: Path) -> None:
    """defects E: 100 [100, 100]; and its marker is not clipped at the edge."""
    write_model(tmp_path, "a")
    write_result(tmp_path, "a", "sst2", [True] * 20)
    page, _, found = written(tmp_path)
    (row,) = found["rows"]
    assert (row["low"], row["high"]) == (pytest.approx(0.8389, abs=1e-3), 1)
    assert numbers.span(row["low"], 1.0) in page
    figure = page[page.index("<svg") : page.index("</svg>")]
    marker = figure[figure.index("<use", figure.index("line2d")) :]
    assert not re.search(r'<g clip-path="[^"]*">\s*<use[^>]*fill: var\(--s1\)', marker)


def test_mistakes_say_row_unit_and_heading(tmp_path: Path) -> None:
    """defects E: under --limit "row 2" was data row 9; scores had no unit."""
    write_model(tmp_path, "a")
    write_result(tmp_path, "a", "sst2", [True, True, False, True])
    page, *_ = written(tmp_path)
    assert "Data row 4: a, answered b" in page  # the third of every second row
    assert "nats per token of the whole prompt" in page and "<h4>Demonstrations</h4>" in page


def test_captions_do_not_scroll_with_their_tables(tmp_path: Path) -> None:
    """defects E: captions were clipped on a narrow screen."""
    ten_models(tmp_path)
    page, *_ = written(tmp_path)
    for scrolled in re.findall(r'<div class="scroll".*?</table></div>', page, flags=re.S):
        assert "figcaption" not in scrolled
        assert "<caption" not in scrolled or 'class="confusion"' in scrolled
    assert page.count("<figcaption>") >= 4


def test_what_cannot_be_compared_is_said(tmp_path: Path) -> None:
    """defects A15: no marks, no p-values and no mean over tasks of other prompts; every model's settings."""
    for name, prompt in (("a", "x"), ("b", "y")):
        write_model(tmp_path, name)
        write_result(tmp_path, name, "sst2", rows(0.5 if name == "a" else 1))
        write_result(
            tmp_path, name, "trec", rows(0.5 if name == "a" else 1), prompt=prompt, shots=len(prompt)
        )
    page, markdown, found = written(tmp_path)
    assert [c["task"] for c in found["comparisons"]] == ["sst2"]
    assert [(c["task"], c["reason"]) for c in found["not_compared"]] == [("trec", "other prompts")]
    assert "b, trec: other prompts" in page and "not comparable: other prompts" in markdown
    assert page.count("not comparable") == 2  # the task and the mean
    settings = page[page.index("<h2>Settings</h2>") :]
    assert "paper" in settings and "minilm" in settings and settings.count(">trec<") == 1


HOSTILE = '</td><script>alert("1")</script>|`*_[x](http://x)_*` $a$ \x1b[31m\u202e &amp;\n# x'


def test_text_from_data_does_nothing(tmp_path: Path) -> None:
    """Names, titles, labels, texts, facts and samples are escaped wherever they are shown."""
    for name in ("a", "b"):
        directory = write_model(tmp_path, name, objective=HOSTILE, origin=HOSTILE, run=HOSTILE, step=1)
        for task in ("sst2", "trec"):
            options: dict[str, Any] = {"title": HOSTILE, "labels": ["a" + HOSTILE, "b"], "text": HOSTILE}
            write_result(tmp_path, name, task, rows(0.5), **options)
        samples = [{"prefix": HOSTILE, "text": HOSTILE, "ended": True, "tokens": 3}]
        samples_file = {"weights": json.loads((directory / "model.json").read_text())["weights"]}
        (directory / "samples.json").write_text(json.dumps(samples_file | {"samples": samples}))
    page, markdown, _ = written(tmp_path, title=HOSTILE, notice=HOSTILE, seeds={HOSTILE: ["a", "b"]})
    assert not {"script", "link", "iframe", "img"} & set(Page(page).tags)
    assert "<script" not in page and "\x1b" not in page and "\u202e" not in page
    tables = [line for line in markdown.splitlines() if line.startswith("|")]
    widths = [len(re.findall(r"(?<!\\)\|", line)) for line in tables]
    heads = [i for i, line in enumerate(tables) if set(line) <= set("| -")]
    for start, end in zip(heads, [*(h - 1 for h in heads[1:]), len(tables)], strict=True):
        assert set(widths[start:end]) == {widths[start]}, "a cell broke its row"
    assert "<" not in markdown.replace("&lt;", "") and "\x1b" not in markdown
    assert len([line for line in markdown.splitlines() if line.startswith("#")]) == 4


@pytest.mark.parametrize(
    "name", ["_a", "$x^$", "a$b_c$d", "\\frac{1}", "日本語", "x" * 150, "#010203", "%d {0}"]
)
def test_any_name_can_be_drawn(name: str, tmp_path: Path) -> None:
    """defects D3: names with $ or with _ first broke the figure."""
    write_model(tmp_path, name)
    write_model(tmp_path, "other")
    for model in (name, "other"):
        for task in ("sst2", "trec"):
            write_result(tmp_path, model, task, rows(0.5), title=f"{name} task")
    page, *_ = written(tmp_path)
    drawn = re.findall(r"<text[^>]*>([^<]*)</text>", page)
    assert html.escape(figures.shortened(name), quote=False) in drawn
    assert "var(--ink)" not in drawn


def test_the_caption_says_what_each_interval_is(tmp_path: Path) -> None:
    write_model(tmp_path, "a")
    for task in ("sst2", "trec"):
        write_result(tmp_path, "a", task, rows(0.5))
    page, *_ = written(tmp_path)
    assert "Tasks: Wilson's interval" in html.unescape(page)
    assert "Mean: the tasks' intervals combined" in html.unescape(page)
    assert "nreadable" not in page


def test_text_alone_is_a_report(tmp_path: Path) -> None:
    sampled(write_model(tmp_path, "a"), "once upon a time")
    page, markdown, found = written(tmp_path)
    assert "once upon a time" in page and "<h2>Accuracy" not in page
    assert found["rows"] == [] and "Accuracy" not in markdown


def test_a_damaged_store_leaves_a_report(tmp_path: Path) -> None:
    """defects D3: what the comparison cannot read is named; the rest is shown."""
    for name in ("a", "b"):
        write_model(tmp_path, name)
        for task in ("sst2", "trec"):
            write_result(tmp_path, name, task, rows(0.5))
    key = read_models([tmp_path])[1].keys["trec"]
    chunk = tmp_path / "store" / key / "chunks" / "00000.json"
    chunk.write_text(chunk.read_text()[:100])
    page, *_ = written(tmp_path)
    assert f"b, trec: {chunk} is damaged" in page


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
