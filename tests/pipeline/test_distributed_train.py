"""Real 2-rank ZeRO-3 runs: resume is exact, stop requests are honoured, the export reloads."""

from __future__ import annotations

import itertools
import json
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from emo.common.errors import ExitCode
from emo.common.labels import IGNORE
from emo.data_prep.config import split_of
from emo.data_prep.shards import TokenDataset
from emo.data_prep.tokenizer import load_tokenizer
from emo.pipeline import checkpoint
from emo.pipeline.report.validation import change, read
from emo.pipeline.run_dir import (
    LAUNCHES,
    LOG,
    SAMPLES,
    VALIDATION,
    checkpoints,
    problem,
    read_metrics,
    read_records,
)
from emo.pipeline.stop import RESUME
from tests.helpers import launching
from tests.helpers.launching import losses, wait_for_step

SETS = ("home", "abroad")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return launching.tiny_recipe(tmp_path_factory.mktemp("tiny"), SETS, eval_steps=3)


@pytest.fixture(scope="module")
def undisturbed(recipe: Path) -> Path:
    """The run directory of a finished, undisturbed run."""
    run_dir = recipe.parent / "undisturbed"
    done = launching.run(2, str(recipe), f"output_dir={run_dir}", "train.save_steps=3")
    assert done.returncode == 0, done.stdout
    return run_dir


def test_a_run_logs_saves_and_exports(undisturbed: Path, recipe: Path) -> None:
    records = read_metrics(undisturbed)
    trained = [r for r in records if "nll" in r]
    assert [r["step"] for r in trained] == list(range(1, 9))
    for record in trained:
        assert 0 < record["nll"] < 8
        assert 0 < record["demd"] < 2
        assert record["loss"] == pytest.approx(record["nll"], rel=1e-5)  # equal by construction (eq. 19)
        assert record["grad_norm"] > 0
    assert trained[-1]["nll"] < trained[0]["nll"]
    held_out = [(r["step"], r["set"]) for r in records if "validation_nll" in r]
    assert held_out == [(step, name) for step in (0, 3, 6, 8) for name in SETS]
    assert [d.name for d in checkpoints(undisturbed)] == ["step-000006", "step-000008"]
    info = json.loads((undisturbed / "export" / "export.json").read_text())
    assert info["step"] == 8
    assert info["objective"] == "emo"
    assert info["tokens"] == trained[-1]["tokens"]


PROMPTS = ["The man saw", "On day 3"]


@pytest.fixture(scope="module")
def killed(recipe: Path) -> Path:
    """The run directory of a run that was killed and started again, and that sampled text at its saves."""
    run_dir = recipe.parent / "killed"
    samples = (f"train.sample_prompts={json.dumps(PROMPTS)}", "train.sample_tokens=6")
    arguments = (str(recipe), f"output_dir={run_dir}", "train.save_steps=3", *samples)
    process = launching.start(2, *arguments)
    wait_for_step(run_dir, 5)
    launching.kill_all(process)
    assert not (run_dir / "export").exists()
    with (run_dir / SAMPLES).open("a") as file:  # of a step that is going to be taken again
        file.write('{"step": 6, "prompt": "It", "text": " was lost"}\n')
    done = launching.run_ranks(2, *arguments)
    assert done.returncode == 0, done.stdout
    assert "resumed from" in done.stdout
    return run_dir


def test_killed_and_started_again_equals_undisturbed(undisturbed: Path, killed: Path) -> None:
    """And sampling under ZeRO-3 changes no number: the undisturbed run did without."""
    assert losses(killed) == losses(undisturbed)
    records = [
        [r | {"time": None} for r in read_metrics(run_dir) if "set" in r] for run_dir in (killed, undisturbed)
    ]
    assert records[0] == records[1] and len(records[0]) == 4 * len(SETS)
    files = [
        {path.relative_to(run_dir): path.read_bytes() for path in (run_dir / VALIDATION).rglob("*.npz")}
        for run_dir in (killed, undisturbed)
    ]
    assert files[0] == files[1] and len(files[0]) == 4 * len(SETS)


@pytest.mark.parametrize(("weights", "step"), [("initial", 0), ("export", 8)])
@pytest.mark.parametrize("name", SETS)
def test_documents_are_measured_as_the_model_alone_reads_them(
    undisturbed: Path, recipe: Path, weights: str, step: int, name: str
) -> None:
    """Each part by itself, whatever the ranks, the micro-batch and the packing; parts of one are summed."""
    model = AutoModelForCausalLM.from_pretrained(undisturbed / weights, dtype=torch.float64)
    data = TokenDataset(recipe.parent / "data" / split_of(name))
    batch = data.batch(np.arange(6))  # train.eval_rows
    parts: dict[int, tuple[float, int]] = {}
    for row, (ids, labels, positions) in enumerate(zip(*batch.values(), strict=True)):
        starts = [*np.flatnonzero(positions == 0), len(ids)]
        for source, (a, b) in zip(data.sources_of(row).tolist(), itertools.pairwise(starts), strict=False):
            if (labels[a:b] != IGNORE).any():
                with torch.no_grad():
                    logits = model(torch.from_numpy(ids[None, a:b])).logits[0]
                each = torch.nn.functional.cross_entropy(
                    logits, torch.from_numpy(labels[a:b]), reduction="none", ignore_index=IGNORE
                )
                nll_so_far, tokens_so_far = parts.get(source, (0.0, 0))
                counted = int((labels[a:b] != IGNORE).sum())
                parts[source] = nll_so_far + float(each.sum()), tokens_so_far + counted
    nll, tokens = zip(*(parts[source] for source in sorted(parts)), strict=True)
    result = read(undisturbed, name, step)
    assert result is not None and result.tokens.tolist() == list(tokens)
    assert result.fingerprint == data.fingerprint
    assert result.nll.tolist() == pytest.approx(list(nll), rel=1e-4)
    record = next(r for r in read_metrics(undisturbed) if (r["step"], r.get("set")) == (step, name))
    assert record["validation_nll"] == pytest.approx(sum(nll) / sum(tokens), rel=1e-4)
    if step:
        start = read(undisturbed, name, 0)
        assert start is not None
        limits = [record[f"validation_change{end}"] for end in ("", "_low", "_high")]
        assert change(start, result) == pytest.approx((*limits, len(tokens)))
        assert limits[1] < limits[0] < 0, "it learns"


def test_samples_are_what_the_export_says(killed: Path) -> None:
    """At the start and at every save, without what a killed launch sampled later; greedy as generate is."""
    records, damaged = read_records(killed / SAMPLES)
    assert not damaged
    assert [(r["step"], r["prompt"]) for r in records] == [(s, p) for s in (0, 3, 6, 8) for p in PROMPTS]
    model = AutoModelForCausalLM.from_pretrained(killed / "export")
    tokenizer = load_tokenizer(killed / "export")
    for record in records[-2:]:
        ids = tokenizer(record["prompt"], add_special_tokens=False, return_tensors="pt").input_ids
        if tokenizer.bos_token_id is not None:
            ids = torch.cat((torch.tensor([[tokenizer.bos_token_id]]), ids), dim=1)
        out = model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
        whole = tokenizer.decode(out[0], skip_special_tokens=True)
        assert record["prompt"] + record["text"] == whole
    assert len({r["text"] for r in records}) > 2, "the texts change while it learns"


def test_launches_are_recorded(undisturbed: Path, killed: Path) -> None:
    """How each began, and how it ended if it could say so: one that was killed could not."""
    first, second = (read_records(run_dir / LAUNCHES)[0] for run_dir in (undisturbed, killed))
    assert [(r["event"], r["step"]) for r in first] == [("begin", 0), ("end", 8)]
    assert (first[0]["ranks"], first[0]["hosts"], first[0]["device"], first[0]["planned"]) == (
        2,
        1,
        "CPU",
        None,
    )
    assert (first[1]["how"], first[1]["reason"]) == ("finished", None)
    assert [r["event"] for r in second] == ["begin", "begin", "end"] and second[1]["step"] == 3
    for run_dir in (undisturbed, killed):
        assert "process" in (run_dir / LOG).read_text()


def test_sigterm_to_one_rank_saves_and_the_same_command_resumes(undisturbed: Path, recipe: Path) -> None:
    run_dir = recipe.parent / "stopped"
    arguments = (str(recipe), f"output_dir={run_dir}")
    process = launching.start(2, *arguments)
    wait_for_step(run_dir, 2)
    launching.ranks_of(process)[1].send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == ExitCode.STOPPED, output
    assert f"and saved (SIGTERM); {RESUME}" in output, "the reason, though another rank had it"
    (saved,) = checkpoints(run_dir)
    assert problem(saved) is None
    assert read_records(run_dir / LAUNCHES)[0][-1]["reason"] == "SIGTERM"
    done = launching.run_ranks(2, *arguments)
    assert done.returncode == 0, done.stdout
    assert losses(run_dir) == losses(undisturbed)


def test_a_torn_newest_checkpoint_is_passed_over(undisturbed: Path, recipe: Path) -> None:
    run_dir = recipe.parent / "torn"
    shutil.copytree(undisturbed, run_dir)
    shutil.rmtree(run_dir / "export")
    newest = checkpoints(run_dir)[-1]
    victim = max((p for p in (newest / "state").rglob("*.pt")), key=lambda p: p.stat().st_size)
    victim.write_bytes(victim.read_bytes()[:-10])
    done = launching.run_ranks(2, str(recipe), f"output_dir={run_dir}", "train.save_steps=3")
    assert done.returncode == 0, done.stdout
    assert "step-000008 is not used" in done.stdout
    assert "resumed from" in done.stdout and "step-000006" in done.stdout
    assert losses(run_dir) == losses(undisturbed)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "train.learning_rate=0.5",
            "was started with train.learning_rate=0.001, and the recipe now has train.learning_rate=0.5",
        ),
        ("model.architecture.vocab_size=100", "head has 100"),
        ("model.path=nobody/no-such-model", "neither a directory here nor a hub model"),
    ],
)
def test_a_mistake_ends_with_one_line(undisturbed: Path, recipe: Path, override: str, message: str) -> None:
    run_dir = undisturbed if override.startswith("train.learning_rate") else recipe.parent / "refused"
    done = launching.run_alone(str(recipe), f"output_dir={run_dir}", override)
    errors = [line for line in done.stdout.splitlines() if line.startswith("error: ")]
    assert done.returncode == 2, done.stdout
    assert len(errors) == 1, done.stdout
    assert message in errors[0]
    assert "Traceback" not in done.stdout
    assert not (recipe.parent / "refused" / "config.yaml").exists()


def test_another_number_of_ranks_resumes_with_the_same_losses(undisturbed: Path, recipe: Path) -> None:
    run_dir = recipe.parent / "ranks"
    shutil.copytree(undisturbed, run_dir)
    shutil.rmtree(run_dir / "export")
    checkpoint.remove(run_dir / "step-000008")
    done = launching.run_alone(str(recipe), f"output_dir={run_dir}")
    assert done.returncode == 0, done.stdout
    assert "was saved by 2 ranks: converting it for 1" in done.stdout
    for result, expected in zip(losses(run_dir), losses(undisturbed), strict=True):
        assert result == pytest.approx(expected, rel=1e-5)
