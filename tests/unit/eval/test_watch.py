"""Watching a run: each complete checkpoint is evaluated once. Also gates, exports and scheduler files.

EVAL_CRASHES sets the number of crashes (default: 3).
"""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import peft
import pytest

from emo.common.errors import ExitCode
from emo.common.io.lease import hold_if_free
from emo.common.io.weights import load_causal_lm
from emo.eval import watch as watch_module
from emo.eval.export.commands import Export
from emo.eval.icl.job import Job
from emo.eval.icl.settings import Settings
from emo.eval.icl.tasks import select_tasks
from emo.eval.models.model import EvaluatedModel
from emo.eval.results import store
from emo.eval.watch import FAILED, FINISHED, WAITING, RunWatcher, find_targets
from emo.pipeline.checkpoint import saver as checkpoint
from emo.pipeline.control.run_dir import (
    HF,
    TASK_SCORES,
    checkpoint_digest,
    checkpoint_files,
    hash_files,
    partial_directory,
    step_directory,
)
from tests.conftest import REPO
from tests.helpers.documents import options
from tests.helpers.evaluating import command, log_chunks, tiny_model, write_tasks
from tests.helpers.results import fabricated, tree

CRASHES = int(os.environ.get("EVAL_CRASHES", "3"))
STEPS, WATCHED = 8, 5  # models, and how many of them appear while watchers crash
FORK = multiprocessing.get_context("fork")
GOOD, BAD = [True] * 40, [True] * 10 + [False] * 30


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the models of several steps."""
    root = tmp_path_factory.mktemp("watch")
    for step in range(STEPS):
        tiny_model(root / f"{step}", seed=step, num_hidden_layers=1)
        facts = {"step": step, "tokens": 1000 * step, "objective": "emo", "run": "run"}
        (root / f"{step}" / "export.json").write_text(json.dumps(facts))
    return root


class Run:
    """A run directory that receives the models as checkpoints, and its watcher."""

    def __init__(self, path: Path, models: Path, data: Path) -> None:
        self.path, self.models, self.data = path, models, data
        path.mkdir()

    def write_partial(self, step: int) -> Path:
        """Write a checkpoint as the trainer does before it is complete."""
        partial = partial_directory(self.path, step)
        shutil.copytree(self.models / f"{step}", partial / HF)
        (partial / "state").mkdir()
        (partial / "state" / "optimizer.pt").write_bytes(os.urandom(100))
        return partial

    def complete(self, partial: Path) -> None:
        checkpoint.write_complete(partial, hash_files(partial, checkpoint_files(partial)))

    def publish(self, *steps: int) -> list[Path]:
        for step in steps:
            self.complete(self.write_partial(step))
        return [checkpoint.publish(self.path, step) for step in steps]

    def watch(self, *options: object) -> int:
        """Return the exit code of one pass."""
        return self.shown(*options)[0]

    def shown(self, *options: object) -> tuple[int, str]:
        """Return the exit code of one pass, and what it prints."""
        arguments = ["watch", self.path, "--once", "--tasks", "sst2", "--data", self.data, *options]
        return command(*arguments)[:2]

    def watcher(self, tasks: str = "sst2", version: str = "paper", **settings: Any) -> RunWatcher:
        chosen, options = select_tasks(tasks, version), Settings(data=str(self.data), **settings)
        return RunWatcher(self.path, chosen, options, self.path / "eval", "auto", lambda text: None)

    @property
    def done(self) -> dict[str, dict[str, Any]]:
        marks = sorted((self.path / "eval" / "watch" / "done").glob("*.json"))
        return {path.stem: json.loads(path.read_text()) for path in marks}


@pytest.fixture
def run(tmp_path: Path, models: Path, world: Path) -> Run:
    return Run(tmp_path / "run", models, world / "data")


def before_each(patch: pytest.MonkeyPatch, hook: Any) -> None:
    """Call `hook` with the model before every evaluation."""
    evaluate = watch_module.run_all
    patch.setattr(watch_module, "run_all", lambda model, *others: (hook(model), evaluate(model, *others))[1])


def _loop(run: Run, log: Path, count: int) -> None:
    """Watch until `count` checkpoints are done."""
    log_chunks(log)
    watch = run.watcher()
    while len(run.done) < count:
        watch.run_once()
        time.sleep(0.02)


@pytest.mark.slow
def test_two_crashing_watchers_evaluate_every_checkpoint_once(run: Run, tmp_path: Path) -> None:
    """Two watchers are killed and restarted at random while checkpoints appear."""
    log, rng = tmp_path / "log", random.Random(1)
    crashes, steps = 0, list(range(WATCHED))
    workers: list[Any] = [None, None]
    deadline = time.monotonic() + 1200
    while len(run.done) < WATCHED:
        assert time.monotonic() < deadline, run.done
        for i, worker in enumerate(workers):
            if worker is None or not worker.is_alive():
                workers[i] = FORK.Process(target=_loop, args=(run, log, WATCHED), daemon=True)
                workers[i].start()
        if steps and rng.random() < 0.7:
            run.publish(steps.pop(0))
        time.sleep(rng.uniform(0.05, 0.3))
        if crashes < CRASHES and rng.random() < 0.6:
            victim = rng.choice(workers)
            os.kill(victim.pid, signal.SIGKILL)
            victim.join()
            crashes += 1
    for worker in workers:
        worker.join(60)
        assert worker.exitcode in (0, -signal.SIGKILL)
    marks = run.done
    assert list(marks) == [f"run-step-{step:06d}" for step in range(WATCHED)]
    assert [mark["step"] for mark in marks.values()] == list(range(WATCHED))
    assert {mark["state"] for mark in marks.values()} == {"evaluated"}
    scored = [line.split()[0] for line in log.read_text().splitlines()]
    assert set(scored) == set(marks)
    assert len(scored) <= WATCHED + CRASHES  # only interrupted evaluations are repeated
    model = EvaluatedModel(str(run.models / str(WATCHED - 1)))
    alone = Job(model, Settings(data=str(run.data)), tmp_path / "alone").run(select_tasks("sst2")[0])
    view = run.path / "eval" / "models" / f"run-step-{WATCHED - 1:06d}" / "sst2.json"
    assert json.loads(view.read_text())["result"] == alone  # the result belongs to its model


def test_the_final_export_is_evaluated_again_when_it_is_replaced(run: Run) -> None:
    run.complete(run.write_partial(5))  # not renamed yet, so not a checkpoint
    assert find_targets(run.path) == [] and run.watcher().run_once() == 0
    run.publish(3)
    watch = run.watcher()
    watch.run_once()
    assert not watch.finished()
    for step in (4, 5):
        shutil.rmtree(run.path / "export", ignore_errors=True)
        shutil.copytree(run.models / f"{step}", run.path / "export")
        assert watch.run_once() == 1 and watch.finished() and run.watcher().run_once() == 0
        assert (run.watcher().run_dir / FINISHED).exists()
        assert run.done["run"]["step"] == step


def test_training_receives_the_accuracy_of_each_checkpoint(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each checkpoint has a line per task, with a setting that ignores other tasks. The export has none."""
    run.publish(1, 2)
    shutil.copytree(run.models / "3", run.path / "export")
    assert run.watch() == 0
    run.publish(4)
    run.watcher("sst2,mmlu").run_once()
    lines = [json.loads(line) for line in (run.path / TASK_SCORES).read_text().splitlines()]
    scored = [line for line in lines if line["task"] == "sst2"]
    assert {line["step"] for line in scored} == {1, 2, 4} and len({line["setting"] for line in scored}) == 1
    for line in scored:
        directory = step_directory(run.path, line["step"])
        assert line["checkpoint"] == checkpoint_digest(directory)
        result = store.read_json_or_none(run.path / f"eval/models/run-{directory.name}/sst2.json")
        assert result is not None and line["value"] == result["result"]["accuracy"]

    def fail(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(watch_module, "append_scores", fail)  # a failure does not affect the evaluation
    run.publish(5)
    assert run.watch() == 0

    def fill(*_: object) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(watch_module, "append_scores", fill)
    run.publish(6)
    assert run.watcher().run_once() == 0  # it waits before the next pass, which tries again


def test_checkpoints_without_an_export_are_named(run: Run) -> None:
    for step in (1, 2):
        partial = run.write_partial(step)
        shutil.rmtree(partial / HF)
        run.complete(partial)
        checkpoint.publish(run.path, step)
    code, shown = run.shown()
    assert code == ExitCode.DONE and not run.done
    assert "2 checkpoints have no export (set train.export_checkpoints=true" in shown
    run.publish(3)
    assert not find_targets(run.path)[1:] and "2 checkpoints have no export" in run.watcher().summary()


def test_a_trainer_checkpoint_is_evaluated_when_it_stops_changing(run: Run) -> None:
    """Without a marker, complete files must stop changing. One that stays incomplete fails until then."""
    name, path = "run-checkpoint-5", run.path / "checkpoint-5"
    shutil.copytree(run.models / "5", path)
    weights, index = path / "model.safetensors", path / "model.safetensors.index.json"
    content, shards = weights.read_bytes(), [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]

    def passed(age: float = 60) -> RunWatcher:
        for file in path.iterdir():
            os.utime(file, (time.time() - age,) * 2)
        watch = run.watcher()
        watch.run_once()
        return watch

    assert passed().names_in(WAITING) == [name]
    (path / "trainer_state.json").write_text("{}")
    assert passed(age=0).names_in(WAITING) == [name]
    text = json.dumps({"weight_map": dict(zip("ab", shards, strict=True))})
    weights.rename(path / shards[0])
    for listed in (text, text[:-4]):
        index.write_text(listed)
        assert passed().names_in(WAITING) == [name]
    index.unlink()
    for part in (content[:5], content[:-1]):
        weights.write_bytes(part)
        assert passed().names_in(WAITING) == [name]
    assert passed(3600).names_in(FAILED) == passed(3600).names_in(FAILED) == [name]
    weights.write_bytes(content)
    assert passed().evaluated == list(run.done) == [name]


@pytest.mark.parametrize("foreign", [True, False])
def test_an_adapter_without_its_base_is_evaluated(foreign: bool, run: Run) -> None:
    """A LoRA run exports one, and so do checkpoints of PEFT with the Hugging Face Trainer."""
    base = run.models / "5"
    model = load_causal_lm(base).model
    settings = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    path = run.path / ("checkpoint-5" if foreign else "export")
    peft.get_peft_model(model, settings).save_pretrained(path)
    facts = json.loads((path / "adapter_config.json").read_text())
    (path / "adapter_config.json").write_text(json.dumps(facts | {"base_model_name_or_path": str(base)}))
    if foreign:
        (path / "trainer_state.json").write_text("{}")
    for file in path.iterdir():
        os.utime(file, (time.time() - 60,) * 2)
    watch = run.watcher()
    assert watch.run_once() == 1, watch.states


def test_links_to_a_checkpoint_that_is_gone_are_removed(run: Run) -> None:
    """A watcher that was killed leaves links, which would keep the files of a deleted checkpoint."""
    run.publish(1)
    pins = run.path / "eval" / "watch" / "pins"
    for name in ("run-step-000000", "run-step-000001"):
        (pins / name).mkdir(parents=True)
    with hold_if_free(store.lease(pins.parent / "leases", "run-step-000000")):
        run.watcher().run_once()
        assert [pin.name for pin in pins.iterdir()] == ["run-step-000000"]  # in use
    run.watcher().run_once()
    assert not [*pins.iterdir()]


def test_changed_tasks_settings_or_rows_are_evaluated_again(run: Run, tmp_path: Path) -> None:
    """A mark has the latest settings and rows of each task. Earlier ones restore their results."""
    run.data = write_tasks(tmp_path / "data", ["sst2", "trec"], train=20, test=8)
    run.publish(3)

    def passed(*tasks: str, **settings: Any) -> int:
        return run.watcher(*tasks, **settings).run_once()

    assert (passed("sst2"), passed("sst2")) == (1, 0)
    assert passed("sst2,trec") == passed("sst2", shots=2) == passed("sst2", "released") == 1
    view = run.path / "eval/models/run-step-000003/sst2.json"
    released = view.read_text()
    assert passed("sst2") == 1 and view.read_text() != released
    assert passed("sst2") == passed("sst2,trec") == passed("sst2", batch_size=2) == 0
    write_tasks(run.data, ["sst2"], train=20, test=7)
    assert (passed("sst2"), passed("sst2")) == (1, 0)


def test_a_bad_checkpoint_does_not_block_the_others(run: Run, tmp_path: Path) -> None:
    """A bad checkpoint is marked as failed, and the others are evaluated. Missing data mark none."""
    run.publish(3)
    assert run.watch("--data", tmp_path / "nowhere") == ExitCode.MISTAKE and not run.done
    partial = run.write_partial(6)  # complete, but not a valid model
    (partial / "hf" / "config.json").write_text('{"model_type": "llama", "hidden_size": 48}')
    run.complete(partial)
    checkpoint.publish(run.path, 6)
    run.publish(7)
    for count in (2, 0):  # not tried again, but still reported
        code, out = run.shown()
        assert code == ExitCode.FAILURE and f"{count} evaluated" in out.splitlines()[-1] and "1 failed" in out
    assert [mark["state"] for mark in run.done.values()] == ["evaluated", "failed", "evaluated"]
    assert "Accuracy over training" in (run.path / "eval" / "report.html").read_text()
    shutil.rmtree(run.path / "step-000006")
    run.publish(6)
    assert run.watch() == 0 and run.done["run-step-000006"]["state"] == "evaluated"


def test_a_transient_failure_is_retried(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.publish(3)

    def lost(model: Any) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        before_each(patch, lost)
        assert run.watch() == ExitCode.FAILURE and not run.done
    assert run.watch() == 0 and len(run.done) == 1


def test_a_checkpoint_may_be_pruned_meanwhile(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer may delete a checkpoint at any time. Hard links keep its files until the end."""
    steps = run.publish(3, 4)
    listed = find_targets(run.path)
    before_each(monkeypatch, lambda model: [checkpoint.remove(step) for step in steps])
    monkeypatch.setattr(watch_module, "find_targets", lambda run_dir: listed)
    assert run.watcher().run_once() == 1
    assert [mark["state"] for mark in run.done.values()] == ["evaluated", "gone"]


def test_a_gate_is_repeatable(run: Run) -> None:
    """A gate uses stored results, after the models are gone. Incomplete results are a mistake."""
    out = run.path / "eval"

    def gated() -> int:
        return run.watch("--no_report", "--fail_on_regression", "base")

    steps = {"run-step-000001": (GOOD, 0), "run-step-000002": (BAD, ExitCode.REGRESSION)}
    for name, (rows, _) in steps.items():
        fabricated(out, name, {"sst2": rows})
    fabricated(out, "base", {"sst2": GOOD})
    for name, (_, code) in steps.items():
        request = run.watcher()._requests()["sst2"]
        asked = {"sst2": {"request": request, "state": "evaluated"}}
        mark = {"name": name, "state": "evaluated", "files": "f", "asked": asked}
        store.replace(out / "watch/done" / f"{name}.json", store.dump(mark))
        assert (gated(), gated()) == (code, code)
    fabricated(out, "run-step-000002", {"sst2": GOOD})
    others = {"other-step-000001": asked, "run-step-000003": {"sst2": {"request": "another"}}}
    for name, entry in others.items():  # of another run, and by other settings
        fabricated(out, name, {"sst2": BAD})
        mark = {"name": name, "state": "evaluated", "files": "f", "asked": entry}
        store.replace(out / "watch/done" / f"{name}.json", store.dump(mark))
    assert gated() == ExitCode.DONE
    fabricated(out, "base", {"trec": GOOD})
    assert gated() == ExitCode.MISTAKE  # a task is missing


def test_a_gate_without_a_verdict_does_not_pass(run: Run) -> None:
    fabricated(run.path / "eval", "base", {"sst2": GOOD})
    assert run.watch("--fail_on_regression", "base", "--max_drop", 2) == ExitCode.FAILURE
    for name in ("", "nobody"):
        assert run.watch("--fail_on_regression", name, "--max_drop", 2) == ExitCode.MISTAKE


def test_every_checkpoint_is_exported_once(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later pass completes a killed or failed export without scoring again. Failures stop nothing."""
    names, scored = ["run-step-000003", "run-step-000004"], list[str]()
    run.publish(3, 4)
    options = [f"--export=lm-eval={tmp_path / 'to'}", f"--export=hf={tmp_path / 'hf'}"]
    before_each(monkeypatch, lambda model: scored.append(model.name))
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(Export, "export", lambda *others: 1 / 0)
        run.watch(*options)
    assert list(run.done) == names[:1] and not (tmp_path / "to").exists()
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / names[0]).write_text("in the way")
    assert run.watch(*options) == ExitCode.FAILURE
    assert list(run.done) == names == scored and (tmp_path / "hf" / names[1] / "README.md").is_file()
    (tmp_path / "hf" / names[0]).unlink()
    marks = []
    for _ in range(2):
        assert run.watch(*options) == 0
        files = list(tree(tmp_path / "to") | tree(tmp_path / "hf"))
        assert all(sum(kind in f for f in files) == 2 for kind in ("/samples_", "/results_", "README"))
        marks.append(tree(run.path / "eval" / "watch" / "exported"))
    assert marks[0] == marks[1]


def test_mistakes_are_reported_before_any_work(run: Run, tmp_path: Path) -> None:
    run.publish(3)
    for wrong in ("--export=hf", "--export=wandb=here", "--export=csv=here", "--poll=0"):
        assert run.shown(wrong) == (ExitCode.MISTAKE, "") and not run.done, wrong
    assert command("watch", tmp_path / "nowhere", "--once", "--data", run.data)[0] == ExitCode.MISTAKE


SCRIPT = REPO / "launch/slurm/evaluate.sbatch"


def test_slurm_requeues_only_transient_failures(tmp_path: Path) -> None:
    """Stand-ins for Slurm's commands record their calls."""
    log, script = tmp_path / "calls", tmp_path / "slurm_script"
    for name, body in (
        ("srun", 'exit "$SRUN_CODE"'),
        ("scontrol", f'[ "$1" != show ] || exec echo "Command={SCRIPT} a"; echo "scontrol $*" >> {log}'),
        ("sbatch", f'echo "sbatch $*" >> {log}'),
    ):
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    # The script puts the checkout's environment first in PATH, but the stand-ins must be found first.
    script.write_text(SCRIPT.read_text().replace("PATH=$repository/.venv/bin:$PATH", "PATH=$PATH"))

    def slurm(code: int, run: Path = tmp_path, **environment: str) -> tuple[int, list[str]]:
        """Return the script's exit code after `code` of srun, and its calls of Slurm's commands."""
        log.write_text("")
        environment |= {
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "SLURM_JOB_ID": "7",
            "SRUN_CODE": f"{code:d}",
        }
        words = ["bash", *map(str, (script, run, tmp_path)), "--tasks", "sst2"]
        done = subprocess.run(words, cwd=REPO, env=os.environ | environment, capture_output=True)
        return done.returncode, log.read_text().splitlines()

    def again(run: Path) -> str:
        return f"sbatch --begin=now+20minutes {SCRIPT} {run} {tmp_path} --tasks sst2"

    assert slurm(ExitCode.FAILURE) == (1, ["scontrol requeue 7"])
    assert slurm(ExitCode.FAILURE, SLURM_RESTART_COUNT="5") == (1, [])  # the number of requeues is limited
    assert slurm(ExitCode.MISTAKE) == slurm(ExitCode.MISTAKE, EVERY="20") == (2, [])
    assert slurm(ExitCode.FAILURE, EVERY="20") == (1, [again(tmp_path)])  # the next pass retries
    early = tmp_path / "not-yet"  # before training: a pass without work, followed by another
    assert slurm(ExitCode.MISTAKE, early, EVERY="20") == (0, [again(early)])
    store.replace(tmp_path / FINISHED, "")
    assert slurm(ExitCode.DONE, EVERY="20") == (0, [])


def test_kubernetes_settings_use_existing_options_and_tasks() -> None:
    settings = [path.read_text() for path in (REPO / "launch/k8s").rglob("kustomization.yaml")]
    chosen = [line for text in settings for line in re.findall(r"EVALUATE=([^#\n]+)", text)]
    assert len(chosen) > 1
    for words in map(shlex.split, chosen):
        assert {word for word in words if word.startswith("--")} <= options("watch")
        assert select_tasks(words[words.index("--tasks") + 1])


def test_kubernetes_uses_existing_options() -> None:
    text = (REPO / "launch/k8s/base/evaluate.yaml").read_text()
    flags = set(re.findall(r"--[a-z_]+", text))
    assert {"--data"} < flags <= options("watch") and "$EVALUATE" in text
    codes = f"values: [{ExitCode.MISTAKE:d}, {ExitCode.REGRESSION:d}]"  # all other codes are retried
    assert re.search(rf"action: FailJob.*\n *onExitCodes: {{ operator: In, {re.escape(codes)} }}", text)
