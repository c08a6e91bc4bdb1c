"""emo export: which models, what is refused, and files of the hub and of W&B, read back by their own code."""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard, parse_eval_result_entries
from hypothesis import given, settings
from hypothesis import strategies as st

from emo.common.lease import Lease, held
from emo.eval import store
from emo.eval.export import figures, harness, hub, tracking
from emo.eval.model import EvaluatedModel
from emo.eval.results import pick, read_models
from emo.pipeline.run_dir import CONFIG, LOCK, LOCK_SECONDS, WANDB_ID
from tests.helpers.evaluating import command, tiny_model
from tests.helpers.results import RIGHT, fabricated, finish, finished, tree, write_model, write_result

OUTCOMES = st.lists(st.tuples(st.booleans(), st.sampled_from("xyz")), min_size=1, max_size=20)


@settings(max_examples=10, deadline=None)
@given(OUTCOMES)
def test_what_is_read_back_is_what_was_exported(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[bool, str]]
) -> None:
    """Errors are s / sqrt(n) with n - 1, by another implementation; sqrt(sum of squares) / k over groups."""
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

    def error(outcomes: list[bool]) -> Any:
        n = len(outcomes)
        return "N/A" if n == 1 else pytest.approx(statistics.stdev(map(float, outcomes)) / math.sqrt(n))

    for task, result in model.results.items():
        assert actual[task]["acc,none"] == pytest.approx(result["accuracy"], abs=1e-12)
        assert actual[task]["macro_f1,none"] == result["macro_f1"]
        assert actual[task]["sample_len"] == len(rows)
        entry = yaml.safe_load((out / "card" / ".eval_results" / f"emo-pipeline-{task}.yaml").read_text())
        assert parse_eval_result_entries(entry)[0].value == actual[task]["acc,none"]
    assert actual["plain"]["acc_stderr,none"] == error(right)
    errors = []
    for group in set(groups):
        of_group, entry = [ok for ok, g in rows if g == group], actual[f"grouped_{group}"]
        assert entry["acc,none"] == pytest.approx(statistics.fmean(of_group))
        assert entry["acc_stderr,none"] == error(of_group)
        errors.append(entry["acc_stderr,none"])
    known = "N/A" not in errors
    mean = math.sqrt(sum(e**2 for e in errors)) / len(errors) if known else "N/A"
    assert actual["grouped"]["acc_stderr,none"] == (pytest.approx(mean) if known else mean)


def test_mistakes_are_refused_and_nothing_is_written(tmp_path: Path) -> None:
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
    assert refused(out, "hf", to=tmp_path / "file")
    view = out / "models" / "mle" / "sst2.json"
    (out / "store" / json.loads(view.read_text())["key"] / "result.json").unlink()
    assert refused(out, "lm-eval", "--name", "mle")
    view.write_text("{")
    assert refused(out, "lm-eval", "--name", "mle")


@pytest.mark.parametrize("change", [lambda r: r[2].update(prediction="a"), lambda r: r.pop()])
def test_results_that_do_not_follow_from_their_rows_are_not_exported(change: Any, tmp_path: Path) -> None:
    finished(tmp_path)
    for chunk in (tmp_path / "store").glob("*/chunks/*.json"):
        records: Any = store.unsealed(chunk)
        change(records)
        chunk.write_text(store.seal(records))
    assert command("export", tmp_path, "--format", "hf", "--output_path", tmp_path / "to")[0] == 2
    assert not (tmp_path / "to").exists()


# --- the hub ----------------------------------------------------------------------------------------------

CARD = """---
license: apache-2.0   # of the weights
tags: [a, "b"]
model-index:
- name: My Model
  results:
  - task: {type: text-generation}
    dataset: {name: HellaSwag, type: hellaswag}
    metrics: [{type: acc_norm, value: 0.5}]
# the language of the text
language:
- en
---
# My model

---
model-index: of the text
"""


def test_the_hub_reads_its_files(tmp_path: Path) -> None:
    def written(directory: Path) -> tuple[ModelCard, Any]:
        hub.write_hub(pick(read_models([tmp_path / "out"]), "emo"), directory, lambda text: None)
        path = directory / ".eval_results" / "emo-pipeline-sst2.yaml"
        assert b"/home" not in b"".join(tree(directory).values())
        entries = parse_eval_result_entries(yaml.safe_load(path.read_text())) if path.exists() else []
        return ModelCard.load(directory / "README.md"), entries

    finished(tmp_path / "out", step=10, run="/home/somebody/runs/emo")
    card, [entry] = written(tmp_path / "card")
    assert card.data.model_name == "emo" and len(card.data.eval_results) == 4
    accuracy = next(r for r in card.data.eval_results if "SST-2" in r.dataset_name)
    assert (accuracy.metric_type, accuracy.metric_value) == ("accuracy", 4 / 6)
    assert accuracy.dataset_type == "SetFit/sst2" and accuracy.dataset_revision is None
    assert accuracy.metric_args["stderr"] == pytest.approx(math.sqrt(4 / 6 * 2 / 6 / 5))
    macro = next(r for r in card.data.eval_results if "MMLU" in r.dataset_name)
    assert macro.metric_value == pytest.approx((1 + 1 / 3 + 1) / 3) and "stderr" not in macro.metric_args
    assert (entry.dataset_id, entry.task_id, entry.value) == ("SetFit/sst2", "default", 4 / 6)
    assert entry.date == "2027-01-15T08:00:00Z" and entry.dataset_revision is None
    finish(tmp_path / "out", from_hub=True)
    assert written(tmp_path / "card")[1][0].dataset_revision == "00ea8cc"
    finish(tmp_path / "out", hub="/data/sst2")  # no data set of the hub
    assert written(tmp_path / "alone")[1] == [] and len(tree(tmp_path / "alone")) == 1


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_a_card_loses_nothing(newline: str, tmp_path: Path) -> None:
    before = CARD.replace("\n", newline)
    results = hub.index_of(finished(tmp_path), figures.all_figures(finished(tmp_path)))
    after = hub.with_index(before, "emo", results)
    assert hub.with_index(after, "emo", results) == after, "exported again, it is another card"
    assert ("\n" in after.replace("\r\n", "")) == (newline == "\n")
    assert after.endswith(before[before.index("# My model") :])
    for line in before.split(newline)[1:3] + before.split(newline)[9:10]:
        assert line in after.split(newline)
    actual = ModelCard(after).data
    assert actual.model_name == "My Model" and actual.language == ["en"] and actual.eval_results is not None
    assert [r.dataset_name for r in actual.eval_results].count("HellaSwag") == 1
    assert len(actual.eval_results) == 1 + 4
    better = hub.with_index(after, "emo", results[:1])  # of another evaluation: these take the place of ours
    assert len(ModelCard(better).data.eval_results or []) == 1 + 2


FRONTS = ("a: [", "- a", "model-index: 3", "{model-index: [], a: 1}",
          "model-index: &x\n- {name: m, results: []}\nb: *x")  # fmt: skip


@pytest.mark.parametrize("front", FRONTS)
def test_a_card_that_cannot_be_read_is_left_alone(front: str, tmp_path: Path) -> None:
    finished(tmp_path / "out")
    (tmp_path / "README.md").write_text(f"---\n{front}\n---\n# x\n")
    before = tree(tmp_path)
    assert command("export", tmp_path / "out", "--format", "hf", "--output_path", tmp_path)[0] == 2
    assert tree(tmp_path) == before


def test_a_directory_with_other_weights_is_refused(tmp_path: Path) -> None:
    directories = [tiny_model(tmp_path / f"{n}", seed=n, num_hidden_layers=1) for n in (0, 1)]
    finished(tmp_path / "out")
    digest = EvaluatedModel(str(directories[0])).digest
    for path in (tmp_path / "out" / "models" / "emo").glob("*.json"):  # as if it had been evaluated
        path.write_text(path.read_text().replace(store.digest("emo"), digest))
    (directories[0] / "README.md").write_text("---\nlicense: mit\n---\n# m\n")
    before = tree(directories[1])
    arguments = ["export", tmp_path / "out", "--format", "hf", "--output_path"]
    assert command(*arguments, directories[1])[0] == 2 and tree(directories[1]) == before
    assert command(*arguments, directories[0])[0] == 0
    assert ModelCard.load(directories[0] / "README.md").data.license == "mit"


def training_run(directory: Path, project: str | None = "emo-test") -> Path:
    directory.mkdir(parents=True)
    (directory / CONFIG).write_text(
        json.dumps({"train": {"report_to": ["wandb"] if project else [], "project": project}})
    )
    (directory / WANDB_ID).write_text("0123456789abcdef")
    return directory


def logged(path: Path) -> Iterator[Any]:
    """The records of a .wandb file, by W&B's own messages: LevelDB's log in blocks of 32 KiB."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, position, text = path.read_bytes(), 7, b""
    while position + 7 <= len(data):
        if (left := 32768 - position % 32768) < 7:
            position += left
            continue
        length, kind = int.from_bytes(data[position + 4 : position + 6], "little"), data[position + 6]
        text += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(text)
            text = b""


@pytest.mark.slow
def test_wandb_gets_every_model_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Points of the training run over its tokens, in their order, whatever the order of evaluation."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    run, out = training_run(tmp_path / "emo"), tmp_path / "out"
    for name, tokens in (("emo-step-2", 200), ("emo-step-1", 100), ("emo", 200)):
        write_model(out, name, step=tokens // 100, tokens=tokens, run=str(run))
        write_result(out, name, "sst2", [*RIGHT, tokens == 200])
    write_model(out, "another", tokens=5, run="/runs/another")
    write_result(out, "another", "sst2", RIGHT)
    finish(out)
    # An export that was killed while it sent: what W&B would send of it goes.
    unsent = run / "wandb" / "offline-run-1-0123456789abcdef"
    unsent.mkdir(parents=True)
    (run / tracking.SENT).write_text(json.dumps({"sent": {}, "sending": unsent.name}))
    code, _, err = command("export", out, "--format", "wandb", "--output_path", run)
    assert code == 0 and not unsent.exists(), err
    (written,) = run.glob("wandb/offline-run-*/*.wandb")
    records = list(logged(written))
    assert {r.run.run_id for r in records if r.HasField("run")} == {"0123456789abcdef"}
    assert {r.run.project for r in records if r.HasField("run")} == {"emo-test"}
    axes = {r.metric.glob_name: r.metric.step_metric for r in records if r.HasField("metric")}
    assert axes["eval/*"] == "eval/tokens"
    points = [
        {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in r.history.item}
        for r in records if r.HasField("history")
    ]  # fmt: skip
    assert [point["eval/tokens"] for point in points] == [100, 200]
    assert [point["eval/step"] for point in points] == [1, 2]
    assert [point["eval/sst2/accuracy"] for point in points] == pytest.approx([4 / 7, 5 / 7])
    assert points[0]["eval/sst2/accuracy_stderr"] == pytest.approx(math.sqrt(4 / 7 * 3 / 7 / 6))
    assert points[0]["eval/mean_accuracy"] == points[0]["eval/sst2/accuracy"]
    assert command("export", out, "--format", "wandb", "--output_path", run)[0] == 0
    assert len(list(run.glob("wandb/offline-run-*"))) == 1


def test_wandb_says_what_it_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, out = training_run(tmp_path / "emo"), tmp_path / "out"
    finished(out, tokens=5, run=str(run))
    arguments = ["export", out, "--format", "wandb", "--output_path"]

    def refused(directory: Path) -> bool:
        return command(*arguments, directory)[0] == 2 and not (run / tracking.SENT).exists()

    with held(Lease(run, LOCK, LOCK_SECONDS)):  # it trains
        assert refused(run)
    with held(store.lease(run, tracking.SENDING)):
        assert refused(run)
    assert refused(training_run(tmp_path / "no" / "emo", None)) and refused(tmp_path / "nowhere")
    assert refused(training_run(tmp_path / "mle"))  # none of these results is of it
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "wandb", None)  # as if it could not be found
        assert refused(run)
    finished(out, run=str(run))  # after how many tokens?
    assert refused(run)
