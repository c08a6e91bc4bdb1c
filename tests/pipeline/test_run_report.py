"""python -m pipeline report: runs as one page, from files that may be damaged, unfinished or strange."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import yaml

from common.errors import ExitCode, UserError
from common.report.numbers import DASH
from pipeline import cli
from pipeline.report.gather import KILLED, read_runs
from pipeline.report.launches import append
from pipeline.report.page import document
from pipeline.run_dir import BAD_BATCHES, CONFIG, EXPORT, HEARTBEAT, LAUNCHES, METRICS, SAMPLES
from tests.helpers.html import Page

ATTACK = '<script>alert("x")</script>'


def train_record(step: int, **changes: Any) -> dict[str, Any]:
    """Ten steps of a thousand tokens in two seconds each; so few quantities are drawn quickly."""
    return {"step": step, "tokens": 1000 * step, "loss": 5 - step / 20, "tokens_per_s": 500.0} | changes


def make_run(directory: Path, steps: int = 40, more: dict[str, float] | None = None, **facts: Any) -> Path:
    """A run directory as the trainer leaves it after `steps`; more: in its records; facts: of its launch."""
    directory.mkdir(parents=True)
    config = {"model": {"path": "some/model"}, "objective": {"name": "emo"}, "train": {"lr": 1e-3}}
    (directory / CONFIG).write_text(yaml.safe_dump(config))
    for step in range(10, steps + 1, 10):
        append(directory / METRICS, train_record(step, **(more or {})))
        if more:
            append(
                directory / METRICS,
                {"step": step, "tokens": 1000 * step, "set": "validation", "validation_nll": 2.5},
            )
    begin = {
        "event": "begin",
        "time": 1.7e9,
        "step": 0,
        "steps": 100,
        "ranks": 2,
        "hosts": 1,
        "device": "CPU",
    }
    append(directory / LAUNCHES, begin | {"batch": 8, "block": 256, "planned": None} | facts)
    return directory


def shown(*paths: Path, over: str = "step") -> tuple[str, Page]:
    text = document(read_runs(paths), over, paths[0]).html()
    return text, Page(text)


def test_a_run_is_one_page(tmp_path: Path) -> None:
    more = {"lr": 1e-3, "nll": 2.0, "demd": 0.5, "grad_norm": 1.0, "skipped": 0}
    text, page = shown(make_run(tmp_path / "run", more=more))
    (row,) = page.table("Run", "State")
    assert (row["Steps"], row["Objective"], row["From"]) == ("40 of 100", "emo", "some/model")
    assert (row["Loss"], row["Held-out loss"], row["State"]) == ("2", "2.5", KILLED)
    assert row["Time"] == "1 min"  # 40 steps of 2 s are 80 s
    for title in ("NLL", "DEMD", "Gradient norm", "Learning rate", "Supervised tokens per second"):
        assert title in text
    assert "MFU)" not in text and "Skipped steps" not in text, "nothing is drawn that no record has"


def test_a_loss_that_is_the_likelihood_is_drawn_once(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    assert "objective minimises" in shown(run)[0]
    (run / METRICS).write_text("")
    for step in (10, 20):
        append(run / METRICS, train_record(step, loss=3.0, nll=3.0 + 1e-6))
    assert "objective minimises" not in shown(run)[0]


@pytest.mark.parametrize("count", [2, 30])
def test_several_runs_share_the_figures(tmp_path: Path, count: int) -> None:
    """Of many the first and the best are in colour, and the others are named."""
    runs = [make_run(tmp_path / str(i) / "run", 20, {"nll": 3 - i / 100}) for i in range(count)]
    text, page = shown(*runs, over="tokens")
    assert {row["Run"] for row in page.table("Run", "State")} == {f"{i}/run" for i in range(count)}
    assert "training tokens" in text and "training steps" not in text
    legend = re.findall(r"</svg>([^<]*)</li>", text[: text.index("<nav")])
    assert legend[0] == "0/run" and len(legend) == min(count, 8)
    assert ("In grey: " in text) == (count > 8)


def test_the_state_is_what_is_known(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    now = time.time()

    def state() -> str:
        return read_runs([run])[0].state(now)

    (run / HEARTBEAT).write_text(json.dumps({"time": now - 5, "doing": "training", "step": 3}))
    assert state() == "runs: training"
    (run / HEARTBEAT).write_text(json.dumps({"time": now - 500, "doing": "training", "step": 3}))
    assert state() == KILLED
    append(run / LAUNCHES, {"event": "end", "time": 1.7e9, "step": 40, "how": "stopped", "reason": "SIGTERM"})
    assert state() == "stopped: SIGTERM"
    append(run / LAUNCHES, {"event": "begin", "time": 1.7e9, "step": 40, "steps": 100})
    append(run / LAUNCHES, {"event": "end", "time": 1.7e9, "step": 43, "how": "stopped"})
    assert read_runs([run])[0].reached == 43, "three steps since the last record"
    (run / EXPORT).mkdir()
    assert state() == "finished"


def test_launches_are_told_with_their_ends(tmp_path: Path) -> None:
    """One that was killed, one that was stopped, one whose first line was written into a torn one."""
    run = make_run(tmp_path / "run")
    with (run / LAUNCHES).open("a") as file:
        file.write('{"event": "begin", "step": 2')  # the disk was full
    append(run / LAUNCHES, {"event": "begin", "time": 1.7e9, "step": 30, "ranks": 4})
    append(
        run / LAUNCHES,
        {"event": "end", "time": 1.7e9, "step": 40, "how": "stopped", "reason": "the file STOP"},
    )
    _, page = shown(run)
    keys = ("How it ended", "After step", "At step", "Ranks")
    first, second = ([row[key] for key in keys] for row in page.table("Run", "How it ended"))
    assert first == [KILLED, "0", DASH, "2"]
    assert second == ["stopped: the file STOP", "30", "40", "4"]


def test_the_plan_stands_beside_what_was_measured(tmp_path: Path) -> None:
    """A pause before the launch and its slow first record change nothing."""
    planned = {"seconds": 1.6, "mfu": 0.5, "memory_gib": 60.0}
    run = make_run(tmp_path / "run", planned=planned)
    slow = {"tokens_per_s": 10.0, "mfu": 0.01, "memory_gib": 70.0}
    lines = [train_record(10, **slow), *(train_record(s, mfu=0.4, memory_gib=66.0) for s in (20, 30, 40))]
    (run / METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    (row,) = shown(run)[1].table("Run", "Seconds per step")
    assert list(row.values())[1:] == [
        "2 planned 1.6, ratio 1.25",
        "1,024 planned 1,280, ratio 0.80",
        "40.0% planned 50.0%, ratio 0.80",
        "70.0 planned 60.0, ratio 1.17",
    ]


def test_utilisation_is_a_mean_over_time() -> None:
    """Ten steps at half the speed count for twice the time: 30 steps in 40 units of 2/3 and 1/3."""
    from pipeline.report.gather import Run

    fast, slow = train_record(20, mfu=0.4), train_record(30, mfu=0.2, tokens_per_s=250.0)
    run = Run("run", Path("run"), records=[train_record(10), fast, slow])
    assert run.measured().mfu == pytest.approx(0.4 * 20 / 60 + 0.2 * 40 / 60)
    assert run.measured().seconds == pytest.approx(60 / 20)


def test_samples_show_the_last_step_first(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    for step in (0, 10, 20):
        append(
            run / SAMPLES, {"step": step, "tokens": 0, "prompt": "The cat", "text": f" said {step} {ATTACK}"}
        )
    text, _ = shown(run)
    assert ATTACK not in text
    places = [text.index(f" said {step} &lt;script") for step in (20, 0, 10)]
    assert places == sorted(places) and "2 earlier" in text


def test_domains_are_drawn_and_mixtures_told(tmp_path: Path) -> None:
    mixed, plain = make_run(tmp_path / "mixed", steps=0), make_run(tmp_path / "plain")
    for step in (10, 20):
        parts = {name: {"tokens": step, "nll": 3.0, "loss": 2.0} for name in ("home", "abroad <b>")}
        append(mixed / METRICS, train_record(step, domains=parts))
    held = [{"step": 0, "mixture": None}, {"step": 10, "mixture": "0.3 home + 0.7 abroad, by tokens"}]
    append(mixed / LAUNCHES, {"event": "begin", "time": 1.7e9, "step": 10, "mixtures": held})
    text, page = shown(mixed, plain)
    assert "Loss on domain home" in text and "Loss on domain abroad &lt;b&gt;" in text
    found = [(row["Mixture"], row["After step"]) for row in page.table("Run", "Mixture")]
    assert found == [("none: all rows alike", "0"), (held[1]["mixture"], "10")]


def test_strange_domains_and_mixtures_cost_only_themselves(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    odd: list[Any] = [3, {"home": 3}, {"home": {"nll": "low"}}, {"home": {"nll": 2.5}}]
    for step, domains in enumerate(odd, start=41):
        append(run / METRICS, train_record(step, domains=domains))
    other = make_run(tmp_path / "other")
    for place, mixtures in ((run, [7, {"step": "x", "mixture": ATTACK}]), (other, 7)):
        append(place / LAUNCHES, {"event": "begin", "time": 1.7e9, "step": 1, "mixtures": mixtures})
    text, page = shown(run, other)
    assert "Loss on domain home" in text
    assert page.table("Run", "Mixture") == [{"Run": "run", "Mixture": ATTACK, "After step": DASH}]


def test_strange_values_cost_only_themselves(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    huge = "1" + "0" * 400
    with (run / METRICS).open("a") as file:
        file.write('{"step": 50, "loss": "high", "nll": null, "lr": true}\n')
        file.write(f'{{"step": 60, "loss": {huge}}}\n')
        file.write("not json\n" + "[" * 100_000 + "\n" + '{"step": "70"}\n{"st')
    append(run / BAD_BATCHES, {"step": 7, "reason": ATTACK, "nll": "nan", "rows": []})
    append(run / LAUNCHES, {"event": "begin", "time": 1e300, "step": 1, "device": ATTACK, "ranks": "two"})
    text, page = shown(run)
    assert "metrics.jsonl: 4 damaged lines" in text
    assert page.table("Run", "Step") == [{"Run": "run", "Step": "7", "What": ATTACK, "Loss": "nan"}]


def test_what_is_missing_is_a_remark(tmp_path: Path) -> None:
    full, empty = make_run(tmp_path / "full"), make_run(tmp_path / "empty", steps=0)
    (full / CONFIG).write_text("a: [")
    text, page = shown(full, empty)
    assert (
        str(full / CONFIG) in text and str(empty / METRICS) in text and len(page.table("Run", "State")) == 2
    )
    with pytest.raises(UserError):
        read_runs([empty])


def test_evaluations_beside_the_run_are_linked(tmp_path: Path) -> None:
    run = make_run(tmp_path / "all" / "a:run #1")
    for place in (run / "eval", tmp_path / "all"):
        place.mkdir(exist_ok=True)
        for name in ("report.html", "results.json"):
            (place / name).write_text("")
    elsewhere = tmp_path / "pages" / "one.html"
    assert cli.main(["report", str(run), "--out", str(elsewhere)]) == ExitCode.DONE
    links = [a for a in Page(elsewhere.read_text(encoding="utf-8")).addresses if not a.startswith("#")]
    assert links == ["../all/a%3Arun%20%231/eval/report.html", "../all/report.html"]
    assert all((elsewhere.parent / unquote(link)).is_file() for link in links)


@pytest.mark.parametrize("made", ["nothing", "empty", "a file"])
def test_what_is_no_run_is_one_line(tmp_path: Path, made: str, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / "run"
    if made == "empty":
        place.mkdir()
    if made == "a file":
        place.write_text("")
    assert cli.main(["report", str(place)]) == ExitCode.MISTAKE
    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {place} is no ") and "run_dir" in line


def test_the_command_writes_where_it_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = str(make_run(tmp_path / "run"))
    monkeypatch.chdir(tmp_path)
    for out in ("new/page.html", ".", "made/"):
        assert cli.main(["report", run, "--out", out]) == ExitCode.DONE
        assert Path(capsys.readouterr().out.splitlines()[0].removeprefix("written: ")).is_file()
    assert (tmp_path / "report.html").is_file() and (tmp_path / "made" / "report.html").is_file()
    assert cli.main(["report", run, "--json", "-"]) == ExitCode.DONE
    assert json.loads(capsys.readouterr().out) == [] and not (tmp_path / "-").exists()
    assert cli.main(["report", run, "--out", "-"]) == ExitCode.DONE
    assert capsys.readouterr().out.startswith("# ")
    assert cli.main(["report", run, "--out", "page.pdf"]) == ExitCode.MISTAKE
