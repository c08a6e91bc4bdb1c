"""Real runs resume exactly on any number of ranks, stop cleanly, mix domains and save in the background."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import signal
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from emo.common.causal_lm import IGNORE
from emo.common.errors import ExitCode
from emo.data_prep.config import split_of
from emo.data_prep.encoding.tokenizer import load_tokenizer
from emo.data_prep.shards.format import TokenDataset
from emo.pipeline.batches.config import MixtureConfig
from emo.pipeline.batches.order import MixedOrder, MixtureStart
from emo.pipeline.checkpoint.export import export_checkpoint
from emo.pipeline.config import load_config
from emo.pipeline.control.heartbeat import read_ranks
from emo.pipeline.control.run_dir import (
    BAD_BATCHES,
    CONFIG,
    EXPORT,
    HF,
    LAUNCHES,
    PROFILE,
    SAMPLES,
    VALIDATION,
    checkpoint_problem,
    checkpoints,
    partial_directory,
    read_metrics,
    read_records,
    step_directory,
    step_of,
)
from emo.pipeline.control.stop import node_name
from emo.pipeline.monitor.documents import compute_change, read_documents
from emo.pipeline.planning.checks import check_run
from tests.helpers import launching
from tests.helpers.corpus import alpaca_rows
from tests.helpers.launching import losses, wait_for_step
from tests.helpers.refusals import refused
from tests.helpers.saving_worker import LAST, SEEN

SETS = ("home", "abroad")  # names of validation sets and of domains
PROMPTS = ["The man saw", "On day 3"]
SHARES = {"home": {"from": 0.2, "to": 0.5, "steps": 4}, "abroad": 0.5}
FIXED_HEAD = ("train.head_lr_ratio=0", "train.weight_decay=0.1")
LATER = {"home": 0.1, "abroad": 0.9}
FIRST = MixtureStart(0, MixtureConfig.model_validate({"shares": SHARES}))
SOURCES = [
    {"files": "text.txt", "format": "lines", "domain": "home"},
    {"embedded": "world-abroad", "limit": 400, "domain": "abroad"},
]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a recipe of two mixed domains and two validation sets that saves at steps 3, 6 and 8."""
    directory = tmp_path_factory.mktemp("tiny")
    saves = {"save_steps": 3, "save_total_limit": 5, "eval_steps": 3}
    return launching.tiny_recipe(directory, SETS, {"sources": SOURCES}, mixture={"shares": SHARES}, **saves)


def run_two_ranks(recipe: Path, run_dir: Path, *options: str) -> None:
    done = launching.run_ranks("launch/continual.sh", str(recipe), f"output_dir={run_dir}", *options)
    assert done.returncode == ExitCode.DONE, done.stdout


def run_one_rank(recipe: Path, run_dir: Path, *options: str, code: ExitCode = ExitCode.DONE) -> str:
    """Run on one rank, check that it exits with `code`, and return its output."""
    done = launching.run_alone(str(recipe), f"output_dir={run_dir}", *options)
    assert done.returncode == code, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def undisturbed(recipe: Path) -> Path:
    """Return the directory of an undisturbed run on two ranks with several passes per step."""
    run_dir = recipe.parent / "undisturbed"
    run_two_ranks(recipe, run_dir)
    return run_dir


def read_steps(run_dir: Path) -> list[dict[str, Any]]:
    return [record for record in read_metrics(run_dir) if "nll" in record]


def test_a_run_logs_saves_and_exports(undisturbed: Path) -> None:
    records = read_steps(undisturbed)
    assert [r["step"] for r in records] == list(range(1, 9))
    for record in records:
        assert 0 < record["nll"] < 8 and 0 < record["demd"] < 2 and record["grad_norm"] > 0
        assert record["loss"] == pytest.approx(record["nll"], rel=1e-5)  # equal by construction (eq. 19)
    assert records[-1]["nll"] < records[0]["nll"]
    validations = [(r["step"], r["set"]) for r in read_metrics(undisturbed) if "validation_nll" in r]
    assert validations == [(step, name) for step in (0, 3, 6, 8) for name in SETS]
    assert [step_of(d) for d in checkpoints(undisturbed)] == [3, 6, 8]
    info = json.loads((undisturbed / EXPORT / "export.json").read_text())
    assert (info["step"], info["objective"], info["tokens"]) == (8, "emo", records[-1]["tokens"])


def read_files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_an_exported_checkpoint_is_the_export_of_the_run(undisturbed: Path, tmp_path: Path) -> None:
    """One process exports a ZeRO-3 checkpoint of two ranks from only the checkpoint and config.yaml."""
    moved, target = tmp_path / "moved", tmp_path / "model"
    shutil.copytree(step_directory(undisturbed, 8), step_directory(moved, 8))
    tree = yaml.safe_load((undisturbed / CONFIG).read_text(encoding="utf-8"))
    tree["data"]["dir"] = "elsewhere"
    (moved / CONFIG).write_text(yaml.safe_dump(tree), encoding="utf-8")
    assert export_checkpoint(moved, target).name == "step-000008"
    assert read_files(target) == read_files(undisturbed / EXPORT)
    with refused("export-target"):
        export_checkpoint(moved, target)
    next((moved / "step-000008/state").iterdir()).write_bytes(b"")
    with refused("checkpoint-damaged"):
        export_checkpoint(moved / "step-000008", tmp_path / "damaged")


def test_a_run_that_was_stopped_and_killed_equals_an_undisturbed_one(undisturbed: Path, recipe: Path) -> None:
    """One rank gets SIGTERM under `emo train`, and later all ranks are killed.

    Sampling under ZeRO-3 changes no results, and its greedy texts equal texts that the export generates.
    """
    run_dir = recipe.parent / "disturbed"
    samples = (f"train.sample_prompts={json.dumps(PROMPTS)}", "train.sample_tokens=6")
    arguments = (str(recipe), f"output_dir={run_dir}", *samples)
    process = launching.start(2, *arguments)
    wait_for_step(run_dir, 2)
    rank = launching.member(run_dir, "rank 1")
    assert rank is not None
    rank.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == ExitCode.STOPPED, output
    saved = step_of(checkpoints(run_dir)[-1])
    with (run_dir / SAMPLES).open("a") as file:  # a sample of a step that will be repeated
        file.write('{"step": 8, "prompt": "It", "text": " was lost"}\n')
    launching.kill_ranks(run_dir, saved + 1, "launch/continual.sh", *arguments)
    run_two_ranks(recipe, run_dir, *samples)
    assert losses(run_dir) == losses(undisturbed)
    for read_results in (read_validations, read_validation_files):
        results = read_results(run_dir)
        assert results == read_results(undisturbed) and len(results) == 4 * len(SETS)
    launches = read_records(run_dir / LAUNCHES)[0]
    starts, ends = ([r for r in launches if r["event"] == event] for event in ("begin", "end"))
    steps = [r["step"] for r in starts]
    assert steps[:2] == [0, saved] and steps[2] in (saved, 3, 6) and len(steps) == 3
    assert ends[0]["reason"] == "SIGTERM", "rank 0 reports the signal of another rank"
    assert (starts[0]["ranks"], starts[0]["hosts"], ends[-1]["how"]) == (2, 1, "finished")
    check_samples(run_dir, saved)


def read_validations(run_dir: Path) -> list[dict[str, Any]]:
    return [record | {"time": None} for record in read_metrics(run_dir) if "set" in record]


def read_validation_files(run_dir: Path) -> dict[Path, bytes]:
    return {path.relative_to(run_dir): path.read_bytes() for path in (run_dir / VALIDATION).rglob("*.npz")}


def check_samples(run_dir: Path, stopped: int) -> None:
    """Check when a run that stopped once wrote samples, and that its export generates the last texts."""
    records, damaged = read_records(run_dir / SAMPLES)
    assert not damaged
    sampled = [step for step in (0, 3, 6, 8) if step != stopped]  # a run that stops writes no samples
    assert [(r["step"], r["prompt"]) for r in records] == [(s, p) for s in sampled for p in PROMPTS]
    model = AutoModelForCausalLM.from_pretrained(run_dir / EXPORT)
    tokenizer = load_tokenizer(run_dir / EXPORT)
    for record in records[-2:]:
        ids = tokenizer(record["prompt"], add_special_tokens=False, return_tensors="pt").input_ids
        if tokenizer.bos_token_id is not None:
            ids = torch.cat((torch.tensor([[tokenizer.bos_token_id]]), ids), dim=1)
        out = model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
        assert record["prompt"] + record["text"] == tokenizer.decode(out[0], skip_special_tokens=True)


@pytest.mark.parametrize("name", SETS)
def test_the_nll_of_a_document_does_not_depend_on_ranks_and_packing(
    undisturbed: Path, recipe: Path, name: str
) -> None:
    """The validation NLL of a document is the sum over its parts, each computed alone with the export."""
    model = AutoModelForCausalLM.from_pretrained(undisturbed / "export", dtype=torch.float64)
    data = TokenDataset(recipe.parent / "data" / split_of(name))
    batch = data.batch(np.arange(6))  # train.eval_rows
    parts: dict[int, tuple[float, int]] = {}
    for row, (ids, labels, positions) in enumerate(zip(*batch.values(), strict=True)):
        starts = [*np.flatnonzero(positions == 0), len(ids)]
        for source, (a, b) in zip(data.sources_of(row).tolist(), itertools.pairwise(starts), strict=False):
            if (labels[a:b] != IGNORE).any():
                with torch.no_grad():
                    logits = model(torch.from_numpy(ids[None, a:b])).logits[0]
                targets = torch.from_numpy(labels[a:b])
                nll = torch.nn.functional.cross_entropy(logits, targets, reduction="sum", ignore_index=IGNORE)
                before, counted = parts.get(source, (0.0, 0))
                parts[source] = before + float(nll), counted + int((labels[a:b] != IGNORE).sum())
    nlls, tokens = zip(*(parts[source] for source in sorted(parts)), strict=True)
    start, result = (read_documents(undisturbed, name, step) for step in (0, 8))
    assert start is not None and result is not None and result.tokens.tolist() == list(tokens)
    assert result.fingerprint == data.fingerprint
    assert result.nll.tolist() == pytest.approx(list(nlls), rel=1e-4)
    record = next(r for r in read_metrics(undisturbed) if (r["step"], r.get("set")) == (8, name))
    assert record["validation_nll"] == pytest.approx(sum(nlls) / sum(tokens), rel=1e-4)
    limits = [record[f"validation_change{end}"] for end in ("", "_low", "_high")]
    assert compute_change(start, result) == pytest.approx((*limits, len(tokens)))
    assert limits[1] < limits[0] < 0, "the NLL falls"


def test_another_number_of_ranks_resumes_with_the_same_losses(undisturbed: Path, recipe: Path) -> None:
    """The run resumes from an older checkpoint, because the newest one is damaged."""
    run_dir = recipe.parent / "ranks"
    shutil.copytree(undisturbed, run_dir)
    shutil.rmtree(run_dir / "export")
    victim = max((checkpoints(run_dir)[-1] / "state").rglob("*.pt"), key=lambda p: p.stat().st_size)
    victim.write_bytes(victim.read_bytes()[:-10])
    output = run_one_rank(recipe, run_dir)
    assert "step-000008 is not used" in output
    assert "step-000006 was saved by 2 ranks: converting it for 1" in output
    for result, expected in zip(losses(run_dir), losses(undisturbed), strict=True):
        assert result == pytest.approx(expected, rel=1e-5)


def test_weighted_data_give_the_same_run_on_any_ranks_and_after_a_kill(tmp_path: Path) -> None:
    """A killed run is identical bit for bit, and one rank agrees up to rounding. Only means are weighted."""
    for domain in "ab":
        rows = [row | {"weight": (0.3, 1, 2.5)[n % 3]} for n, row in enumerate(alpaca_rows(120))]
        rows = [row | {"instruction": f"{domain} {row['instruction']}"} for row in rows]
        (tmp_path / f"{domain}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    sources = [{"files": f"{domain}.jsonl", "domain": domain} for domain in "ab"]
    data = {"kind": "instruct", "template": "chat", "sources": sources, "sequence_len": 64}
    recipe = launching.tiny_recipe(tmp_path, (), data, save_steps=3, eval_steps=4)
    two, killed, one = (tmp_path / name for name in ("two", "killed", "one"))
    run_two_ranks(recipe, two)
    launching.kill_ranks(killed, 4, "launch/continual.sh", str(recipe), f"output_dir={killed}")
    run_two_ranks(recipe, killed)
    assert losses(killed) == losses(two) and len(losses(two)) == 8
    assert read_validations(killed) == read_validations(two)
    assert read_validation_files(killed) == read_validation_files(two)
    assert read_files(killed / EXPORT)["model.safetensors"] == read_files(two / EXPORT)["model.safetensors"]
    output = run_one_rank(recipe, one)
    assert "loss weights: 0.3 to 2.5; " in output
    for result, expected in zip(losses(one), losses(two), strict=True):
        assert result == pytest.approx(expected, rel=1e-5)
    measured = [[r["validation_nll"] for r in read_validations(run_dir)] for run_dir in (one, two)]
    assert measured[0] == pytest.approx(measured[1], rel=1e-5)
    objective = "{name: kl, teacher: {ema: 0.9}, on_policy: {share: 1, tokens: 6}}"
    with refused("weighted-prompts"):
        check_run(load_config(recipe, [f"objective={objective}"]), 1)
    first = read_steps(two)[0]
    weights, nlls = zip(*((part["tokens"], part["nll"]) for part in first["domains"].values()), strict=True)
    assert first["nll"] == pytest.approx(np.average(nlls, weights=weights), rel=1e-5)
    assert isinstance(first["tokens"], int) and sum(weights) != pytest.approx(first["tokens"], rel=1e-3)


# An objective whose gradient is finite, but whose loss is NaN for the probabilities of a new model.
NAN_LOSS = """
import torch
from emo.pipeline.loss.objectives import Coefficients


def nan_loss(m):
    new = (m > 5.945) & (m < 5.955)
    return Coefficients(torch.where(new, float("nan"), m), A=torch.ones_like(m))
"""


def test_a_loss_that_is_not_finite_changes_no_weight(recipe: Path, tmp_path: Path) -> None:
    run_dir, objective = tmp_path / "run", tmp_path / "objective.py"
    objective.write_text(NAN_LOSS)
    options = ["train.max_steps=2", "deepspeed=ds_configs/zero2.json", f"objective.name={objective}:nan_loss"]
    run_one_rank(recipe, run_dir, *options)
    assert len((run_dir / BAD_BATCHES).read_text(encoding="utf-8").splitlines()) == 2
    first, last = (load_file(run_dir / name / "model.safetensors") for name in ("initial", "export"))
    assert all(torch.equal(first[name], last[name]) for name in first)


def tokens_of_domains(recipe: Path, history: list[MixtureStart], steps: int) -> list[int]:
    """Return the supervised tokens of each domain in the first steps."""
    data = TokenDataset(recipe.parent / "data" / "train")
    order = MixedOrder(data.domain, data.valid, data.domains, 8, 42, history)
    rows = np.concatenate([order.step_rows(step) for step in range(steps)])
    return np.bincount(data.domain[rows], weights=data.valid[rows]).astype(int).tolist()


def test_domains_add_up_to_the_step(recipe: Path, undisturbed: Path) -> None:
    """Domain tokens follow the order of rows, and the step's loss and NLL are means over the domains."""
    before = [0, 0]
    for record in read_steps(undisturbed):
        parts = [record["domains"][name] for name in SETS]
        tokens = [part["tokens"] for part in parts]
        assert tokens == tokens_of_domains(recipe, [FIRST], record["step"])
        counts = np.subtract(tokens, before)
        for key in ("nll", "loss"):
            values = [part[key] if count else 0 for part, count in zip(parts, counts, strict=True)]
            assert np.dot(counts, values) / counts.sum() == pytest.approx(record[key], rel=1e-5)
        before = tokens


def test_a_mixture_changes_at_a_resume(recipe: Path, undisturbed: Path) -> None:
    """After a resume from step 3, rows follow the new mixture."""
    run_dir = recipe.parent / "changed"
    shutil.copytree(undisturbed, run_dir)
    for directory in (run_dir / EXPORT, *(step_directory(run_dir, step) for step in (6, 8))):
        shutil.rmtree(directory)
    mixture = f"train.mixture={json.dumps({'shares': LATER})}"
    run_two_ranks(recipe, run_dir, mixture, "train.mixture_from=3")
    history = [FIRST, MixtureStart(3, MixtureConfig.model_validate({"shares": LATER}))]
    last = read_steps(run_dir)[-1]["domains"]
    assert [last[name]["tokens"] for name in SETS] == tokens_of_domains(recipe, history, 8)
    assert last != read_steps(undisturbed)[-1]["domains"]
    assert read_steps(run_dir)[:3] == read_steps(undisturbed)[:3]
    written = yaml.safe_load((run_dir / CONFIG).read_text())["mixtures"]
    assert [entry["step"] for entry in written] == [0, 3] and written[1]["mixture"]["shares"] == LATER


def test_preflight_reports_what_a_host_lacks(recipe: Path, tmp_path: Path) -> None:
    """Preflight accepts two ranks, and reports missing data and an impossible run directory."""
    command = ["-m", "emo", "preflight", str(recipe)]
    for _ in range(3):  # a busy machine may slow down the memory of one rank
        done = launching.run_ranks(*command, f"output_dir={tmp_path / 'run'}", COLUMNS="200")
        if done.returncode == 0:
            break
    assert done.returncode == 0 and "all-reduce" in done.stdout, done.stdout
    assert not (tmp_path / "run").exists()
    (tmp_path / "file").write_text("")
    wrong = [f"output_dir={tmp_path / 'file' / 'run'}", f"data.dir={tmp_path / 'none'}"]
    done = launching.run_forked([{"COLUMNS": "200"}], *command, *wrong)
    assert done.returncode == 1, done.stdout
    assert all(cure in done.stdout for cure in ("emo prepare", "set output_dir to a writable directory"))


def run_disturbed(
    disturbance: str, recipe: Path, run_dir: Path, *options: str, code: ExitCode = ExitCode.DONE
) -> str:
    """Return the output of two ranks with a `disturbance` of tests/helpers/saving_worker.py."""
    saves = (f"train.max_steps={LAST}", "train.save_steps=2", "train.export_checkpoints=true")
    arguments = (disturbance, str(recipe), f"output_dir={run_dir}", *saves, *options)
    done = launching.run_ranks("-m", "tests.helpers.saving_worker", *arguments)
    assert done.returncode == code, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def late_exports(recipe: Path) -> Path:
    """Return a run with late exports, one kept checkpoint, copies next to it and a fixed head."""
    run_dir = recipe.parent / "late-exports"
    options = ("train.save_total_limit=1", f"train.copy_to={recipe.parent / 'copies'}", *FIXED_HEAD)
    run_disturbed("late", recipe, run_dir, *options)
    return run_dir


def test_background_exports_have_the_weights_of_their_step(late_exports: Path) -> None:
    """Training continues during an export, and a checkpoint is invisible until it is complete."""
    assert [json.loads(line) for line in (late_exports.parent / SEEN).read_text().splitlines()] == [
        {"step": 2, "checkpoints": [], "targets": []},
        {"step": 4, "checkpoints": [2], "targets": ["late-exports-step-000002"]},
    ]
    copies = checkpoints(late_exports.parent / "copies")
    assert [step_of(d) for d in checkpoints(late_exports)] == [LAST]
    assert [step_of(d) for d in copies] == [2, 4]
    exports = []
    for directory in copies:
        assert checkpoint_problem(directory) is None
        exports.append(load_file(directory / HF / "model.safetensors"))
        state = get_fp32_state_dict_from_zero_checkpoint(str(directory), tag="state")
        assert exports[-1].keys() == state.keys()
        assert all(torch.equal(exports[-1][name], state[name]) for name in state)
        assert json.loads((directory / HF / "export.json").read_text())["step"] == step_of(directory)
    assert not torch.equal(*(export["model.embed_tokens.weight"] for export in exports))
    final = load_file(late_exports / EXPORT / "model.safetensors")
    assert all(torch.equal(final[name], exports[-1][name]) for name in final)


def test_a_run_resumes_from_copies_and_a_full_disk_loses_no_checkpoint(
    recipe: Path, late_exports: Path, tmp_path: Path
) -> None:
    """The run directory is gone and the newer of two copies is damaged, so the older copy is used.

    Under ZeRO-3 and after a resume, a head with learning rate 0 does not change despite weight decay.
    """
    run_dir, target = tmp_path / "run", tmp_path / "copies"
    shutil.copytree(late_exports.parent / "copies", target)
    next((target / f"step-{LAST:06d}/state").glob("*optim*")).write_bytes(b"damaged")
    options = (f"train.copy_to={target}", *FIXED_HEAD)
    leftover = partial_directory(run_dir, 9)  # of a killed launch
    leftover.mkdir(parents=True)
    output = run_disturbed("late", recipe, run_dir, *options, "train.seed=5", code=ExitCode.MISTAKE)
    assert f"{target} was" in output
    assert not (run_dir / CONFIG).exists() and not checkpoints(run_dir) and not leftover.exists()
    output = run_disturbed("full", recipe, run_dir, "train.save_steps=1", *options, code=ExitCode.FAILURE)
    assert re.search(rf"step-{LAST:06d} in .* is not used: state/", output), output
    assert "fetched step-000002" in output and "Traceback" not in output
    (remaining,) = checkpoints(run_dir)
    assert step_of(remaining) == 2 and checkpoint_problem(remaining) is None
    run_two_ranks(recipe, run_dir, f"train.max_steps={LAST}", *FIXED_HEAD)
    assert losses(run_dir) == losses(late_exports)
    # A launch of the finished run completes copies that an interrupted one has not made.
    run_two_ranks(
        recipe, run_dir, f"train.max_steps={LAST}", f"train.copy_to={tmp_path / 'late'}", *FIXED_HEAD
    )
    assert {path.parent.name for path in (tmp_path / "late").glob("*/COMPLETE")} >= {f"step-{LAST:06d}"}
    directories = (late_exports / "initial", run_dir / EXPORT)
    first, last = (load_file(directory / "model.safetensors") for directory in directories)
    assert [name for name in first if torch.equal(first[name], last[name])] == ["lm_head.weight"]


def test_weights_that_are_not_finite_are_not_saved(recipe: Path, tmp_path: Path) -> None:
    """A single infinite weight on one rank ends the run with code 2, because a restart would fail again."""
    options = ["train.save_steps=1", "train.export_checkpoints=false", "train.async_save=false"]
    output = run_disturbed("damaged", recipe, tmp_path / "run", *options, code=ExitCode.MISTAKE)
    assert "Traceback" not in output
    assert [step_of(d) for d in checkpoints(tmp_path / "run")] == [1]
    assert not list((tmp_path / "run").glob("step-*.partial")) and not (tmp_path / "run" / EXPORT).exists()


def test_a_rank_that_hangs_ends_the_run_and_is_named(recipe: Path, tmp_path: Path) -> None:
    options = ("train.timeout_minutes=0.05", "train.save_steps=0", "train.micro_batch_size=2")
    output = run_disturbed("hanging", recipe, tmp_path / "run", *options, code=ExitCode.FAILURE)
    assert "rank 0 lost another rank" in output
    reason = read_records(tmp_path / "run" / LAUNCHES)[0][-1]["reason"]
    culprit = r"late: rank 1 on \S+ \(training\); others waited in all_reduce \(engine"
    assert re.search(culprit, reason), reason
    assert reason.partition("; ")[2] in output


def test_a_slow_rank_is_named(recipe: Path, tmp_path: Path) -> None:
    """Rank 1 is slow on its host and in both passes of the head. Validation and saves are not measured."""
    options = ["train.export_checkpoints=false", "train.eval_steps=6", "train.save_steps=6"]
    options += ["train.max_steps=12", "train.profile={steps: [2, 2], ranks: [1]}", "train.micro_batch_size=2"]
    output = run_disturbed("slow", recipe, tmp_path / "run", *options)
    assert [path.name for path in (tmp_path / "run" / PROFILE).iterdir()] == ["rank-1.json.gz"]
    first, *records = read_steps(tmp_path / "run")
    assert "slowest_rank" not in first
    for record in records:  # the injected delays are 0.3 s, to which other load on the machine adds
        assert record["slowest_host"] == node_name()
        assert record["rank_seconds_median"] > 0 and record["rank_seconds_max"] >= 0.3
    most, middle = (
        statistics.median(r[f"rank_seconds_{name}"] for r in records) for name in ("max", "median")
    )
    assert most > 1.2 * middle
    assert sum(record["slowest_rank"] == 1 for record in records) > len(records) / 2
    assert output.count("warning: rank 1 on") == 1
    states = read_ranks(tmp_path / "run")
    assert [(state["step"], state["doing"]) for state in states.values()] == [(12, "finished")] * 2
    assert states[1]["seconds"] >= 0.3
