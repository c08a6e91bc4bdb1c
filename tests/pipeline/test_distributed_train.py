"""Real 2-rank ZeRO-3 runs: resume is exact, stop requests are honoured, the export reloads."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from common.exit_codes import ExitCode
from pipeline import checkpoint
from pipeline.run_dir import checkpoints, problem, read_metrics
from tests.helpers import launching
from tests.helpers.launching import losses, wait_for_step


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return launching.tiny_recipe(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def undisturbed(recipe: Path) -> Path:
    """The run directory of a finished, undisturbed run."""
    run_dir = recipe.parent / "undisturbed"
    done = launching.run(2, str(recipe), f"run_dir={run_dir}", "train.save_every=3")
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
    assert any("validation_nll" in r for r in records)
    assert [d.name for d in checkpoints(undisturbed)] == ["step-000006", "step-000008"]
    info = json.loads((undisturbed / "export" / "export.json").read_text())
    assert info["step"] == 8
    assert info["objective"] == "emo"
    assert info["tokens"] == trained[-1]["tokens"]


def test_the_export_generates(undisturbed: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(undisturbed / "export")
    tokenizer = AutoTokenizer.from_pretrained(undisturbed / "export")
    assert model.config.architectures == ["LlamaForCausalLM"]
    ids = tokenizer("The", return_tensors="pt").input_ids
    torch.manual_seed(0)
    out = model.generate(ids, max_new_tokens=8, do_sample=True, pad_token_id=tokenizer.eos_token_id)
    assert out.shape[1] > ids.shape[1]


def test_attention_without_a_mask_trains_and_validates_the_same(undisturbed: Path, recipe: Path) -> None:
    """From the recipe to the export, which is compared with the model that trained when it is written."""
    run_dir = recipe.parent / "varlen"
    done = launching.run_alone(str(recipe), f"run_dir={run_dir}", "model.attn_implementation=varlen")
    assert done.returncode == 0, done.stdout
    for found, expected in zip(losses(run_dir), losses(undisturbed), strict=True):
        assert found == pytest.approx(expected, rel=1e-5)
    validated = [
        [r["validation_nll"] for r in read_metrics(place) if "validation_nll" in r]
        for place in (run_dir, undisturbed)
    ]
    assert validated[0] == pytest.approx(validated[1], rel=1e-5)
    assert "varlen" not in (run_dir / "export" / "config.json").read_text()


def test_killed_and_started_again_equals_undisturbed(undisturbed: Path, recipe: Path) -> None:
    run_dir = recipe.parent / "killed"
    arguments = (str(recipe), f"run_dir={run_dir}", "train.save_every=3")
    process = launching.start(2, *arguments)
    wait_for_step(run_dir, 5)
    launching.kill_all(process)
    assert not (run_dir / "export").exists()
    done = launching.run_ranks(2, *arguments)
    assert done.returncode == 0, done.stdout
    assert "resumed from" in done.stdout
    assert losses(run_dir) == losses(undisturbed)


def test_sigterm_to_one_rank_saves_and_the_same_command_resumes(undisturbed: Path, recipe: Path) -> None:
    run_dir = recipe.parent / "stopped"
    arguments = (str(recipe), f"run_dir={run_dir}")
    process = launching.start(2, *arguments)
    wait_for_step(run_dir, 2)
    launching.ranks_of(process)[1].send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == ExitCode.STOPPED, output
    (saved,) = checkpoints(run_dir)
    assert problem(saved) is None
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
    done = launching.run_ranks(2, str(recipe), f"run_dir={run_dir}", "train.save_every=3")
    assert done.returncode == 0, done.stdout
    assert "step-000008 is not used" in done.stdout
    assert "resumed from" in done.stdout and "step-000006" in done.stdout
    assert losses(run_dir) == losses(undisturbed)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.lr=0.5", "was started with train.lr=0.001, and the recipe now has train.lr=0.5"),
        ("model.architecture.vocab_size=100", "head has 100"),
        ("model.path=nobody/no-such-model", "neither a directory here nor a hub model"),
    ],
)
def test_a_mistake_ends_with_one_line(undisturbed: Path, recipe: Path, override: str, message: str) -> None:
    run_dir = undisturbed if override.startswith("train.lr") else recipe.parent / "refused"
    done = launching.run_alone(str(recipe), f"run_dir={run_dir}", override)
    errors = [line for line in done.stdout.splitlines() if line.startswith("error: ")]
    assert done.returncode == 2, done.stdout
    assert len(errors) == 1, done.stdout
    assert message in errors[0]
    assert "Traceback" not in done.stdout
    assert not (recipe.parent / "refused" / "config.yaml").exists()


def test_a_mistake_on_two_ranks_is_told_once(recipe: Path) -> None:
    done = launching.run_ranks(2, str(recipe), f"run_dir={recipe.parent / 'refused'}", "train.batch=7")
    errors = [line for line in done.stdout.splitlines() if line.startswith("error: ")]
    assert done.returncode == 2, done.stdout
    assert len(errors) == 1, done.stdout
    assert "train.batch=7 does not divide over 2 ranks; set train.batch=6" in errors[0]


def test_another_number_of_ranks_resumes_with_the_same_losses(undisturbed: Path, recipe: Path) -> None:
    run_dir = recipe.parent / "ranks"
    shutil.copytree(undisturbed, run_dir)
    shutil.rmtree(run_dir / "export")
    checkpoint.remove(run_dir / "step-000008")
    done = launching.run_alone(str(recipe), f"run_dir={run_dir}")
    assert done.returncode == 0, done.stdout
    assert "was saved by 2 ranks: converting it for 1" in done.stdout
    for found, expected in zip(losses(run_dir), losses(undisturbed), strict=True):
        assert found == pytest.approx(expected, rel=1e-5)
