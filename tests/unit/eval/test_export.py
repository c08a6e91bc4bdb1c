"""emo export: rejected input, and files that lm-evaluation-harness, the Hub and W&B can read."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from huggingface_hub import ModelCard, parse_eval_result_entries

from emo.common.io.lease import Lease, hold_if_free
from emo.eval.export import figures, harness, hub, tracking
from emo.eval.models.model import EvaluatedModel
from emo.eval.results import store
from emo.eval.results.directory import find_model, read_models
from emo.pipeline.control.run_dir import CONFIG, LOCK, LOCK_SECONDS, WANDB_ID
from tests.helpers.evaluating import command, is_mistake, load, naive_nll, read_lines, tiny_model
from tests.helpers.results import RIGHT, fabricated, finish, finished, tree, write_model, write_result


def test_mistakes_are_refused_and_nothing_is_written(tmp_path: Path) -> None:
    """Unknown formats and models, an ambiguous model, and damaged or incomplete results are rejected."""
    out = tmp_path / "out"
    finished(out)
    fabricated(out, "mle", {"sst2": RIGHT})
    write_model(out, "described")
    finish(out)
    view = out / "models" / "mle" / "sst2.json"
    (out / "store" / json.loads(view.read_text())["key"] / "result.json").unlink()
    for form, *options in (
        ("lm_eval",), ("hf",), ("hf", "--name", "mel"), ("hf", "--name", "described"),
        ("lm-eval", "--name", "mle"),
    ):  # fmt: skip
        assert is_mistake("export", out, "--format", form, "--output_path", tmp_path / "to", *options)
    for chunk in (out / "store").glob("*/chunks/*.json"):  # rows no longer agree with the results
        records: Any = store.unsealed(chunk)
        records[2].update(prediction="a")
        chunk.write_text(store.seal_json(records))
    assert is_mistake("export", out, "--format", "hf", "--output_path", tmp_path / "to", "--name", "emo")
    assert not (tmp_path / "to").exists()


TASKS = ["sst2", "mmlu"]


@pytest.fixture(scope="module")
def evaluated(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Evaluate a model on six of twelve rows, and export the results."""
    root = tmp_path_factory.mktemp("export")
    arguments = ["--tasks", ",".join(TASKS), "--data", world / "data", "--name", "m", "--limit", 6]
    assert command("eval", "--model", world / "model", *arguments, "--output_path", root / "out")[0] == 0
    export = ["export", root / "out", "--format", "lm-eval", "--output_path", root / "there"]
    assert command(*export, "--data", world / "data")[0] == 0
    return root


def exported(directory: Path) -> dict[str, Any]:
    """Return the only results file of the model."""
    (path,) = (directory / "m").glob("results_*.json")
    return json.loads(path.read_text())


def samples(evaluated: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the samples by task or subtask, named as lm-evaluation-harness does by file name."""
    paths = (evaluated / "there" / "m").glob("samples_*.jsonl")
    return {path.name[path.name.find("_") + 1 : path.name.rfind("_")]: read_lines(path) for path in paths}


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.parametrize("task", TASKS)
def test_samples_contain_the_scored_prompts(world: Path, evaluated: Path, task: str) -> None:
    """Each response is minus the mean NLL per token of context and continuation in a plain forward pass."""
    model, tokenizer = load(world / "model")
    of_task = [s for name, actual in samples(evaluated).items() if name.startswith(task) for s in actual]
    assert len({s["doc_id"] for s in of_task}) == len(of_task) == 6
    for sample in of_task[::2]:
        pairs = list(sample["arguments"].values())
        for pair, (response, _) in zip(pairs, sample["filtered_resps"], strict=True):
            ids = tokenizer(pair["arg_0"] + pair["arg_1"]).input_ids
            assert float(response) == pytest.approx(-naive_nll(model, ids).sum() / len(ids), rel=1e-4)
        assert len({pair["arg_0"] for pair in pairs}) == 1


def test_lm_evaluation_harness_reads_its_files(evaluated: Path) -> None:
    """The files match its schema, hashes, table, aggregation of groups and standard errors."""
    from lm_eval import utils
    from lm_eval.api.metrics import aggregate_subtask_metrics, mean_stderr
    from lm_eval.result_schema import EvalResults, SampleResult

    value, rows = exported(evaluated / "there"), samples(evaluated)
    assert value.keys() <= EvalResults.__annotations__.keys()
    assert set(value["results"]) == set(rows) | {"mmlu"} == set(value["versions"]) == set(value["n-shot"])
    assert (value["n-shot"]["sst2"], value["n-shot"]["mmlu"]) == (8, 5)
    assert value["n-samples"]["sst2"] == {"original": 12, "effective": 6}
    for name, actual in rows.items():
        outcomes = [s["acc"] for s in actual]
        stderr = pytest.approx(mean_stderr(outcomes)) if len(outcomes) > 1 else "N/A"
        expected = (pytest.approx(np.mean(outcomes)), stderr, len(actual))
        entry = value["results"][name]
        assert (entry["acc,none"], entry["acc_stderr,none"], entry["sample_len"]) == expected
        for s in actual:
            assert s.keys() - {"acc"} == SampleResult.__annotations__.keys()
            assert s["doc_hash"] == sha(json.dumps(s["doc"], indent=2, ensure_ascii=False))
            assert s["prompt_hash"] == sha(s["arguments"]["gen_args_0"]["arg_0"])
            assert s["target_hash"] == sha(s["target"])
            chosen = int(np.argmax([float(value) for value, _ in s["filtered_resps"]]))
            assert s["acc"] == float(chosen == int(s["target"]))
            assert value["configs"][name]["doc_to_choice"][int(s["target"])] == s["doc"]["label"]
        hashes = "".join(s["doc_hash"] + s["prompt_hash"] + s["target_hash"] for s in actual)
        assert value["task_hashes"][name] == sha(hashes)
    parts = [value["results"][name] for name in value["group_subtasks"]["mmlu"]]
    accuracies, sizes = [part["acc,none"] for part in parts], [part["sample_len"] for part in parts]
    mean = aggregate_subtask_metrics(accuracies, sizes, weight_by_size=False)
    assert value["groups"]["mmlu"]["acc,none"] == pytest.approx(mean)
    error = math.hypot(*(part["acc_stderr,none"] for part in parts)) / len(parts)
    assert value["groups"]["mmlu"]["acc_stderr,none"] == pytest.approx(error)
    table = utils.make_table(value)
    assert f"{value['results']['sst2']['acc,none']:.4f}" in table and "MMLU" in table


def test_exporting_again_writes_the_same_files(world: Path, evaluated: Path, tmp_path: Path) -> None:
    """A repeated export completes what a killed one left. Without the data only results are exported."""
    model, expected = find_model(read_models([evaluated / "out"]), "m"), evaluated / "there"
    for _ in range(2):
        harness.write_harness(model, tmp_path, str(world / "data"))
        assert tree(tmp_path) == tree(expected)
        next(tmp_path.glob("m/results_*")).unlink()
    assert str(world).encode() not in b"".join(tree(expected).values()), "a path of this machine"
    alone = json.loads(harness.write_harness(model, tmp_path / "alone", None).read_text())
    whole = exported(expected)
    assert alone == {name: whole[name] for name in alone} and len(tree(tmp_path / "alone")) == 1


def test_other_rows_or_prompts_than_the_evaluated_ones_are_rejected(
    world: Path, evaluated: Path, tmp_path: Path
) -> None:
    shutil.copytree(world / "data", tmp_path / "data")
    arguments = ["export", evaluated / "out", "--format", "lm-eval", "--output_path", tmp_path / "there"]
    arguments += ["--data", tmp_path / "data"]
    for split in ("test", "train"):
        path = tmp_path / "data" / "sst2" / f"{split}.jsonl"
        content = path.read_text()
        path.write_text(content.replace("the", "a", 1))
        assert is_mistake(*arguments) and not (tmp_path / "there").exists()
        path.write_text(content)
    ours = tmp_path / "sst2.yaml"
    spec = (Path(harness.__file__).parents[1] / "icl" / "tasks" / "sst2.yaml").read_text()
    ours.write_text(spec.replace("It is {label}.'", "So it is {label}.'"))
    assert is_mistake(*arguments, "--tasks", ours)
    assert command(*arguments)[0] == 0


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
        hub.write_hub(find_model(read_models([tmp_path / "out"]), "emo"), directory, lambda text: None)
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
    assert macro.metric_value == pytest.approx((1 + 1 / 3 + 1) / 3)
    assert "stderr" not in macro.metric_args  # undefined for a group of one row
    assert (entry.dataset_id, entry.task_id, entry.value) == ("SetFit/sst2", "default", 4 / 6)
    assert entry.date == "2027-01-15T08:00:00Z" and entry.dataset_revision is None
    finish(tmp_path / "out", from_hub=True)
    assert written(tmp_path / "card")[1][0].dataset_revision == "00ea8cc"
    finish(tmp_path / "out", hub="/data/sst2")  # a path is not a data set of the Hub
    assert written(tmp_path / "alone")[1] == [] and len(tree(tmp_path / "alone")) == 1


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_the_rest_of_a_model_card_is_unchanged(newline: str, tmp_path: Path) -> None:
    before = CARD.replace("\n", newline)
    results = hub.model_index(finished(tmp_path), figures.read_figures(finished(tmp_path)))
    after = hub.add_index(before, "emo", results)
    assert hub.add_index(after, "emo", results) == after, "exported again, it is another card"
    assert ("\n" in after.replace("\r\n", "")) == (newline == "\n")
    assert after.endswith(before[before.index("# My model") :])
    assert {*before.split(newline)[1:3], before.split(newline)[9]} < set(after.split(newline))
    for card, count in ((after, 4), (hub.add_index(after, "emo", results[:1]), 2)):  # ours are replaced
        actual = ModelCard(card).data
        assert actual.model_name == "My Model" and actual.language == ["en"]
        assert "HellaSwag" in [result.dataset_name for result in actual.eval_results or []]
        assert len(actual.eval_results or []) == 1 + count


def test_other_weights_and_unreadable_cards_are_rejected(world: Path, tmp_path: Path) -> None:
    finished(tmp_path / "out")
    digest = EvaluatedModel(str(world / "model")).digest
    for path in (tmp_path / "out" / "models" / "emo").glob("*.json"):  # pretend that this model was evaluated
        path.write_text(path.read_text().replace(store.digest_json("emo"), digest))
    arguments = ["export", tmp_path / "out", "--format", "hf", "--output_path"]
    model = Path(shutil.copytree(world / "model", tmp_path / "model"))
    fronts = ("a: [", "- a", "model-index: 3", "{model-index: [], a: 1}",
              "model-index: &x\n- {name: m, results: []}\nb: *x")  # fmt: skip
    for front in fronts:
        (model / "README.md").write_text(f"---\n{front}\n---\n# x\n")
        before = tree(model)
        assert is_mistake(*arguments, model) and tree(model) == before, front
    (model / "README.md").write_text("---\nlicense: mit\n---\n# m\n")
    assert command(*arguments, model)[0] == 0
    assert ModelCard.load(model / "README.md").data.license == "mit"
    other = tiny_model(tmp_path / "other", seed=1)
    before = tree(other)
    assert is_mistake(*arguments, other) and tree(other) == before


def training_run(directory: Path, project: str | None = "emo-test") -> Path:
    directory.mkdir(parents=True)
    train = {"report_to": ["wandb"] if project else [], "project": project}
    (directory / CONFIG).write_text(json.dumps({"train": train}))
    (directory / WANDB_ID).write_text("0123456789abcdef")
    return directory


def logged(path: Path) -> Iterator[Any]:
    """Yield the records of a .wandb file, which is a LevelDB log in blocks of 32 KiB."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, position, text = path.read_bytes(), 7, b""
    while position + 7 <= len(data):
        if (left := 32768 - position % 32768) < 7:
            position += left
            continue
        length, kind = int.from_bytes(data[position + 4 : position + 6], "little"), data[position + 6]
        text += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a complete record, or the last part of one
            yield Record.FromString(text)
            text = b""


@pytest.mark.slow
def test_wandb_gets_every_model_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Points are in the order of training tokens, not of evaluation."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    run, out = training_run(tmp_path / "emo"), tmp_path / "out"
    for name, tokens in (("emo-step-2", 200), ("emo-step-1", 100), ("emo", 200)):
        write_model(out, name, step=tokens // 100, tokens=tokens, run=str(run))
        write_result(out, name, "sst2", [*RIGHT, tokens == 200])
    write_model(out, "another", tokens=5, run="/runs/another")
    write_result(out, "another", "sst2", RIGHT)
    finish(out)
    # A killed export left an offline run that was not sent. It is removed.
    unsent = run / "wandb" / "offline-run-1-0123456789abcdef"
    unsent.mkdir(parents=True)
    (run / tracking.SENT).write_text(json.dumps({"sent": {}, "sending": unsent.name}))
    for _ in range(2):
        assert command("export", out, "--format", "wandb", "--output_path", run)[0] == 0
    assert not unsent.exists()
    (written,) = run.glob("wandb/offline-run-*/*.wandb")
    records = list(logged(written))
    runs = {(r.run.run_id, r.run.project) for r in records if r.HasField("run")}
    assert runs == {("0123456789abcdef", "emo-test")}
    axes = {r.metric.glob_name: r.metric.step_metric for r in records if r.HasField("metric")}
    assert axes["eval/*"] == "eval/tokens"
    points = [
        {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in r.history.item}
        for r in records if r.HasField("history")
    ]  # fmt: skip
    assert [(point["eval/tokens"], point["eval/step"]) for point in points] == [(100, 1), (200, 2)]
    assert [point["eval/sst2/accuracy"] for point in points] == pytest.approx([4 / 7, 5 / 7])
    assert points[0]["eval/sst2/accuracy_stderr"] == pytest.approx(math.sqrt(4 / 7 * 3 / 7 / 6))
    assert points[0]["eval/mean_accuracy"] == points[0]["eval/sst2/accuracy"]


def test_results_unfit_for_wandb_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, out = training_run(tmp_path / "emo"), tmp_path / "out"
    finished(out, tokens=5, run=str(run))

    def is_refused(directory: Path = run) -> bool:
        refused = is_mistake("export", out, "--format", "wandb", "--output_path", directory)
        return refused and not (run / tracking.SENT).exists()

    for lease in (Lease(run, LOCK, LOCK_SECONDS), store.lease(run, tracking.SENDING)):
        with hold_if_free(lease):  # during training, or while another export sends
            assert is_refused()
    assert is_refused(training_run(tmp_path / "no" / "emo", None))
    assert is_refused(training_run(tmp_path / "mle"))  # no result belongs to this run
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "wandb", None)  # as if it were not installed
        assert is_refused()
    finished(out, run=str(run))  # the number of tokens is unknown
    assert is_refused()


def test_groups_of_one_name_and_lost_demonstrations_in_the_harness_files(tmp_path: Path) -> None:
    write_model(tmp_path, "m")
    groups = ["a/b", "a b", "a_b", "a/b", "a b", "a_b"]
    write_result(tmp_path, "m", "mmlu", RIGHT, groups, lost=[3, 0, 0, 0, 0, 1])
    finish(tmp_path)
    model = find_model(read_models([tmp_path]), "m")
    value = json.loads(harness.write_harness(model, tmp_path / "out", None).read_text())
    names = value["group_subtasks"]["mmlu"]
    assert sorted(names) == ["mmlu_a_b", "mmlu_a_b_2", "mmlu_a_b_3"]
    assert {value["results"][name]["alias"] for name in names} == set(groups)
    assert value["configs"]["mmlu_a_b"]["metadata"]["rows_shortened"] == 2
