"""python -m pipeline report: runs as one page, from files that may be damaged, unfinished or strange."""

from __future__ import annotations

import html
import json
import re
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import yaml

from common.errors import UserError
from common.exit_codes import ExitCode
from pipeline import cli
from pipeline.report.gather import read_runs
from common.untrusted import number
from pipeline.report.launches import append
from pipeline.report.page import document
from pipeline.run_dir import BAD_BATCHES, CONFIG, EXPORT, HEARTBEAT, LAUNCHES, METRICS, SAMPLES

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


class Page(HTMLParser):
    """The tables, links and remarks of a page; fails on tags that do not match."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: list[list[list[str]]] = []
        self.links: list[str] = []
        self.tags: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag == "a":
            self.links.append(dict(attrs)["href"] or "")
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("td", "th"):
            self.tables[-1][-1].append("")
        if tag != "meta":
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "td" in self._open or "th" in self._open:
            self.tables[-1][-1][-1] += data


def shown(*paths: Path, over: str = "step") -> tuple[str, Page]:
    text = write_report(read_runs(paths), None, over).read_text()
    return text, Page(text)


def test_a_run_is_one_page_without_anything_outside_it(tmp_path: Path) -> None:
    more = {"lr": 1e-3, "nll": 2.0, "demd": 0.5, "grad_norm": 1.0, "skipped": 0}
    run = make_run(tmp_path / "run", more=more)
    text, page = shown(run)
    assert (
        not page.links
        and "script" not in page.tags
        and "://" not in re.sub(r"http://www\.w3\.org\S+", "", text)
    )
    summary = dict(zip(*page.tables[0], strict=True))
    assert (
        summary["Steps"] == "40 of 100" and summary["Objective"] == "emo" and summary["From"] == "some/model"
    )
    assert (summary["NLL"], summary["Held-out NLL"]) == ("2", "2.5")
    assert summary["Time"] == "1 min"  # 40 steps of 2 s are 80 s
    assert summary["State"] == "ended without a word"
    for title in (
        "Loss (what",
        "NLL (nats",
        "DEMD",
        "Gradient norm",
        "Learning rate",
        "Supervised tokens per second",
    ):
        assert title in text
    assert "MFU (share" not in text and "Skipped steps" not in text, "nothing is drawn that no record has"


def test_a_loss_that_is_the_likelihood_is_drawn_once(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (run / METRICS).write_text("")
    for step in (10, 20):
        append(run / METRICS, train_record(step, loss=3.0, nll=3.0 + 1e-6))
    text, _ = shown(run)
    assert "EMO's loss has the value of the NLL" in html.unescape(text)
    assert "Loss, which is the NLL" in text and "what the objective minimises" not in text


def test_several_runs_share_the_figures(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name / "run", steps) for name, steps in (("a", 40), ("b", 20))]
    text, page = shown(*runs, over="tokens")
    assert [line[0] for line in page.tables[0][1:]] == ["a/run", "b/run"], "the same name is told apart"
    assert "training tokens" in text and "training steps" not in text
    assert text.count("<svg") == 2, "one figure in two widths"


def test_the_state_is_what_is_known(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    now = time.time()

    def state() -> str:
        return read_runs([run])[0].state(now)

    (run / HEARTBEAT).write_text(json.dumps({"time": now - 5, "doing": "training", "step": 3}))
    assert state() == "runs: training"
    (run / HEARTBEAT).write_text(json.dumps({"time": now - 500, "doing": "training", "step": 3}))
    assert state() == "ended without a word"
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
    first, second = ([row[1], row[4], row[6], row[7]] for row in page.tables[1][1:])
    assert first == ["ended without a word", "0", "\u2013", "2"]
    assert second == ["stopped: the file STOP", "30", "40", "4"]


def test_the_plan_stands_beside_what_was_measured(tmp_path: Path) -> None:
    """A pause before the launch and its slow first record change nothing."""
    planned = {"seconds": 1.6, "mfu": 0.5, "memory_gib": 60.0}
    run = make_run(tmp_path / "run", planned=planned)
    slow = {"tokens_per_s": 10.0, "mfu": 0.01, "memory_gib": 70.0}
    lines = [train_record(10, **slow), *(train_record(s, mfu=0.4, memory_gib=66.0) for s in (20, 30, 40))]
    (run / METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    _, page = shown(run)
    rows = {row[1]: row[2:] for row in page.tables[2][1:]}
    assert rows["seconds per step"] == ["1.6", "2", "1.25"]
    assert rows["tokens per second, all that a batch has room for"] == ["1,280", "1,024", "0.80"]
    assert rows["MFU"] == ["50.0%", "40.0%", "0.80"]
    assert rows["peak memory of a GPU, GiB"] == ["60.0", "70.0", "1.17"]


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
    text, page = shown(run)
    assert ATTACK not in text and "script" not in page.tags
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
    assert "NLL of domain home (nats per token)" in text and "NLL of domain abroad &lt;b&gt;" in text
    (table,) = (t for t in page.tables if t[0] == ["Run", "Mixture", "After step"])
    assert [line[1:] for line in table[1:]] == [["none: all rows alike", "0"], [held[1]["mixture"], "10"]]


def test_strange_domains_and_mixtures_cost_only_themselves(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    odd: list[Any] = [3, {"home": 3}, {"home": {"nll": "low"}}, {"home": {"nll": 2.5}}]
    for step, domains in enumerate(odd, start=41):
        append(run / METRICS, train_record(step, domains=domains))
    other = make_run(tmp_path / "other")
    for place, mixtures in ((run, [7, {"step": "x", "mixture": ATTACK}]), (other, 7)):
        append(place / LAUNCHES, {"event": "begin", "time": 1.7e9, "step": 1, "mixtures": mixtures})
    text, page = shown(run, other)
    assert "NLL of domain home" in text and "script" not in page.tags
    assert ["run", ATTACK, "\u2013"] in [line for table in page.tables for line in table]


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
    assert "metrics.jsonl: 4 lines could not be read" in text and "script" not in page.tags
    assert page.tables[-1][1][1:] == ["7", ATTACK, "nan"]


def test_an_unreadable_configuration_is_a_remark(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (run / CONFIG).write_text("a: [")
    text, _ = shown(run)
    assert f"{run / CONFIG} is missing or cannot be read." in text


def test_a_run_without_records_is_a_remark_beside_others(tmp_path: Path) -> None:
    full, empty = make_run(tmp_path / "full"), make_run(tmp_path / "empty", steps=0)
    text, page = shown(full, empty)
    assert f"{empty / METRICS}: no step is recorded yet." in text and len(page.tables[0]) == 3
    with pytest.raises(UserError, match=r"no step is recorded yet; the first is after train.log_every steps"):
        read_runs([empty])
    assert not (empty / "report.html").exists()


def test_evaluations_beside_the_run_are_linked(tmp_path: Path) -> None:
    run = make_run(tmp_path / "all" / "a:run #1")
    for place in (run / "eval", tmp_path / "all"):
        place.mkdir(exist_ok=True)
        for name in ("report.html", "results.json"):
            (place / name).write_text("")
    elsewhere = tmp_path / "pages" / "one.html"
    page = Page(write_report(read_runs([run]), elsewhere, "step").read_text())
    assert page.links == ["../all/a%3Arun%20%231/eval/report.html", "../all/report.html"]
    assert all((elsewhere.parent / unquote(link)).is_file() for link in page.links)


def test_curves_of_many_records_are_means_of_neighbours() -> None:
    points = [(float(i), float(i % 2)) for i in range(1000)]
    few = thinned(points, 100)
    assert len(few) == 100 and few[0] == (4.5, 0.5) and few[-1] == (994.5, 0.5)
    assert thinned(points[:3], 100) == points[:3] and thinned([], 100) == []


@pytest.mark.parametrize("value", [True, "1", None, float("nan"), float("inf"), 10**400, [1]])
def test_what_is_no_number(value: object) -> None:
    assert number(value) is None


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


def test_the_command_says_where_the_page_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run")
    assert cli.main(["report", str(run), "--out", str(tmp_path / "new" / "page.html")]) == ExitCode.DONE
    assert capsys.readouterr().out == f"written: {tmp_path / 'new' / 'page.html'}\n"
    assert cli.main(["report", str(run), "--out", str(run)]) == ExitCode.MISTAKE
    assert "cannot be written (Is a directory); set another --out" in capsys.readouterr().err
