"""Watching a run: every complete checkpoint exactly once, no other ever.

EVAL_CRASHES sets the number of crashes (10).
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from emo.common.errors import FailureError
from emo.common.lease import Lease, held
from emo.eval import targets as targets_module
from emo.eval import watch as watch_module
from emo.eval.export.commands import Export
from emo.eval.icl.job import Job, run_all
from emo.eval.icl.settings import Settings
from emo.eval.icl.tasks import select_tasks
from emo.eval.targets import targets
from emo.eval.watch import Watch
from emo.pipeline import checkpoint
from emo.pipeline.run_dir import HF, LOCK, LOCK_SECONDS, describe, list_files, partial_directory
from tests.helpers.evaluating import command, tiny_model, write_tasks

CRASHES = int(os.environ.get("EVAL_CRASHES", "10"))
STEPS = 10
FORK = multiprocessing.get_context("fork")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Data, models of several steps, warm embeddings."""
    root = tmp_path_factory.mktemp("watch")
    os.environ["EVAL_CACHE"] = str(root / "cache")
    write_tasks(root / "data", ["sst2"], train=20, test=12)
    for step in range(STEPS):
        tiny_model(root / "models" / f"{step}", seed=step, num_hidden_layers=1)
        facts = {"step": step, "tokens": 1000 * step, "objective": "emo", "run": "run"}
        (root / "models" / f"{step}" / "export.json").write_text(json.dumps(facts))
    yield root
    del os.environ["EVAL_CACHE"]


def write_partial(world: Path, run: Path, step: int) -> Path:
    """A checkpoint as the trainer leaves it before it is complete."""
    partial = partial_directory(run, step)
    shutil.copytree(world / "models" / f"{step}", partial / HF)
    (partial / "state").mkdir()
    (partial / "state" / "optimizer.pt").write_bytes(os.urandom(100))
    return partial


def complete(partial: Path) -> None:
    checkpoint.write_complete(partial, describe(partial, list_files(partial)))


def publish(world: Path, run: Path, step: int) -> Path:
    complete(write_partial(world, run, step))
    return checkpoint.publish(run, step)


def watcher(world: Path, run: Path, messages: list[str] | None = None) -> Watch:
    settings = Settings(data=str(world / "data"))
    say = messages.append if messages is not None else (lambda text: None)
    return Watch(run, select_tasks("sst2"), settings, run / "eval", "auto", say)


def done(run: Path) -> dict[str, dict[str, Any]]:
    return {
        p.stem: json.loads(p.read_text()) for p in sorted((run / "eval" / "watch" / "done").glob("*.json"))
    }


def _loop(world: Path, run: Path, log: Path, count: int) -> None:
    """A watcher that stays until `count` checkpoints are done; a line in `log` for every chunk scored."""
    original = Job._score_rows

    def logged(self: Job, *arguments: Any) -> Any:
        records = original(self, *arguments)
        with log.open("a", encoding="utf-8") as file:
            file.write(f"{self.model.name}\n")
        return records

    Job._score_rows = logged  # type: ignore[method-assign]  # a fork: nobody else sees this
    watch = watcher(world, run)
    while len(done(run)) < count:
        watch.once()
        time.sleep(0.02)


@pytest.mark.slow
def test_two_watchers_many_checkpoints_and_crashes(world: Path, tmp_path: Path) -> None:
    """Checkpoints appear while two watchers work and are killed and started again at random."""
    run, log = tmp_path / "run", tmp_path / "log"
    run.mkdir()
    rng = random.Random(1)
    crashes, steps = 0, list(range(STEPS))
    write_partial(world, run, STEPS - 1)  # never completed before the end
    workers: list[Any] = [None, None]
    while steps or len(done(run)) < STEPS or crashes < CRASHES:
        for i, worker in enumerate(workers):
            if worker is None or not worker.is_alive():
                workers[i] = FORK.Process(target=_loop, args=(world, run, log, STEPS))
                workers[i].start()
        if steps and rng.random() < 0.7:
            step = steps.pop(0)
            if step == STEPS - 1:
                complete(partial_directory(run, STEPS - 1))
                checkpoint.publish(run, STEPS - 1)
            else:
                publish(world, run, step)
        time.sleep(rng.uniform(0.05, 0.3))
        if crashes < CRASHES and rng.random() < 0.6:
            victim = rng.choice(workers)
            os.kill(victim.pid, signal.SIGKILL)
            victim.join()
            crashes += 1
        if len(done(run)) == STEPS and crashes < CRASHES:  # slow machines: crash idle watchers too
            crashes = CRASHES
    for worker in workers:
        worker.join(60)
        assert worker.exitcode in (0, -signal.SIGKILL)
    actual = done(run)
    assert sorted(actual) == [f"run-step-{step:06d}" for step in range(STEPS)]
    assert all(facts["state"] == "evaluated" for facts in actual.values())
    assert [facts["step"] for facts in actual.values()] == list(range(STEPS))
    scored = log.read_text().splitlines()
    assert set(scored) == set(actual)
    assert len(scored) <= STEPS + CRASHES  # again only what a crash cut off after scoring, before publishing
    for step in (0, STEPS - 1):  # each got its own model's result
        alone = Job(_model(world, step), Settings(data=str(world / "data")), tmp_path / "alone")
        expected = alone.run(select_tasks("sst2")[0])
        view = json.loads((run / "eval" / "models" / f"run-step-{step:06d}" / "sst2.json").read_text())
        assert view["result"] == expected
    assert not list((run / "eval" / "watch" / "pins").iterdir())


def _model(world: Path, step: int) -> Any:
    from emo.eval.model import EvaluatedModel

    return EvaluatedModel(str(world / "models" / str(step)))


BROKEN = {
    "no COMPLETE": lambda c: (c / "COMPLETE").unlink(),
    "empty COMPLETE": lambda c: (c / "COMPLETE").write_text(""),
    "truncated weights": lambda c: _change(c / "hf" / "model.safetensors", lambda b: b[: len(b) // 2]),
    "flipped byte": lambda c: _change(c / "hf" / "model.safetensors", lambda b: b[:-9] + b"\x55" + b[-8:]),
    "missing weights": lambda c: (c / "hf" / "model.safetensors").unlink(),
    "missing tokenizer": lambda c: (c / "hf" / "tokenizer.json").unlink(),
    "no export": lambda c: shutil.rmtree(c / "hf"),
}


def _change(path: Path, change: Any) -> None:
    data = path.read_bytes()
    assert change(data) != data
    path.write_bytes(change(data))


@pytest.mark.parametrize("kind", list(BROKEN))
def test_a_torn_checkpoint_is_never_scored(kind: str, world: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    whole = publish(world, run, 3)
    BROKEN[kind](whole)
    watch = watcher(world, run)
    assert watch.once() == 0
    listed = kind not in ("no COMPLETE", "no export")  # what is not listed is not a checkpoint
    assert [facts["state"] for facts in done(run).values()] == ["failed"] * listed
    assert list(watch.failed) == ["run-step-000003"] * listed and not (run / "eval" / "models").exists()
    shutil.rmtree(whole)
    publish(world, run, 3)  # written again, whole
    assert watch.once() == 1 and not watch.failed


def test_the_final_export_counts_and_again_when_it_is_replaced(world: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    complete(write_partial(world, run, 5))  # not renamed yet: no checkpoint
    assert targets(run) == [] and watcher(world, run).once() == 0
    publish(world, run, 3)
    watch = watcher(world, run)
    watch.once()
    assert not watch.finished()
    for step in (4, 5):
        shutil.rmtree(run / "export", ignore_errors=True)
        shutil.copytree(world / "models" / f"{step}", run / "export")
        assert watch.once() == 1 and watch.finished() and watcher(world, run).once() == 0
        assert done(run)["run"]["step"] == step
    assert sorted(done(run)) == ["run", "run-step-000003"]


def trainer_checkpoint(world: Path, run: Path, step: int, age: float = 0.0) -> Path:
    """A checkpoint of the Hugging Face Trainer whose last file was written `age` seconds ago."""
    path = run / f"checkpoint-{step}"
    shutil.copytree(world / "models" / f"{step}", path)
    (path / "trainer_state.json").write_text("{}")
    rest(path, age)
    return path


def rest(path: Path, age: float) -> None:
    for file in path.iterdir():
        os.utime(file, (time.time() - age,) * 2)


def test_a_trainer_checkpoint_counts_when_it_rests(world: Path, tmp_path: Path) -> None:
    """Foreign runs have no marker: trainer_state.json, every shard of the index, none cut short, at rest."""
    run = tmp_path / "run"
    path = trainer_checkpoint(world, run, 5, age=60)
    watch = watcher(world, run)

    def not_ready(age: float = 60) -> None:
        rest(path, age)
        assert watch.once() == 0 and list(watch.waiting) == ["run-checkpoint-5"]

    (path / "trainer_state.json").rename(tmp_path / "state")
    not_ready()
    (tmp_path / "state").rename(path / "trainer_state.json")
    weights, index = path / "model.safetensors", path / "model.safetensors.index.json"
    content = weights.read_bytes()
    for cut in (content[: len(content) // 2], content[:-1], content[:5], b""):
        weights.write_bytes(cut)
        not_ready()
    weights.write_bytes(content)
    not_ready(age=0)
    weights.rename(path / "model-00001-of-00002.safetensors")
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    for text in (json.dumps({"weight_map": names}), json.dumps({"weight_map": names})[:-4]):
        index.write_text(text)
        not_ready()
    index.unlink()
    not_ready()
    (path / "model-00001-of-00002.safetensors").rename(weights)
    rest(path, 60)
    arguments = ["watch", run, "--once", "--tasks", "sst2", "--data", world / "data"]
    assert command(*arguments)[0] == 0 and list(done(run)) == ["run-checkpoint-5"]


def test_passes_remember_how_long_a_checkpoint_rests(world: Path, tmp_path: Path) -> None:
    """Times in the future (another machine's clock) do not keep a checkpoint from being evaluated."""
    run = tmp_path / "run"
    path = trainer_checkpoint(world, run, 5, age=-3600)
    note = run / "eval" / "watch" / "seen" / "run-checkpoint-5.json"

    def a_minute_later() -> None:
        facts = json.loads(note.read_text())
        note.write_text(json.dumps(facts | {"since": facts["since"] - 60}))

    assert watcher(world, run).once() == 0
    a_minute_later()
    (path / "config.json").write_text((path / "config.json").read_text() + " ")
    rest(path, -3600)
    assert watcher(world, run).once() == 0  # it has changed since
    a_minute_later()
    assert watcher(world, run).once() == 1


def test_a_checkpoint_that_stays_cut_short_has_failed(world: Path, tmp_path: Path) -> None:
    """Its writer is gone. It is said once, `--until_finished` can end, and what is written again counts."""
    run = tmp_path / "run"
    weights = trainer_checkpoint(world, run, 5, age=3600) / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1])
    rest(weights.parent, 3600)
    batches = run / "eval" / "watch" / "seen" / "run-checkpoint-5.json"
    messages: list[str] = []
    for _ in range(4):  # a scheduler's passes; quick ones prove nothing
        watch = watcher(world, run, messages)
        assert watch.once() == 0 and list(watch.waiting) == ["run-checkpoint-5"] and not watch.failed
    batches.write_text(json.dumps(json.loads(batches.read_text()) | {"since": time.time() - 3000}))
    for _ in range(2):
        watch = watcher(world, run, messages)
        assert watch.once() == 0 and not watch.waiting and list(watch.failed) == ["run-checkpoint-5"]
    assert len([line for line in messages if "for 50 minutes" in line]) == 1
    weights.write_bytes(content)
    rest(weights.parent, 60)
    assert watcher(world, run).once() == 1


def test_other_tasks_or_settings_are_evaluated_anew(world: Path, tmp_path: Path) -> None:
    """A mark counts for the tasks, settings and data it was made with."""
    run, data = tmp_path / "run", write_tasks(tmp_path / "data", ["sst2", "trec"], train=20, test=8)
    publish(world, run, 3)

    def passed(tasks: str, version: str = "paper", **settings: Any) -> int:
        options = Settings(data=str(data), **settings)
        return Watch(
            run, select_tasks(tasks, version), options, run / "eval", "auto", lambda line: None
        ).once()

    assert (passed("sst2"), passed("sst2")) == (1, 0)
    assert (passed("sst2,trec"), passed("sst2,trec")) == (1, 0)
    assert (passed("sst2", shots=2), passed("sst2", shots=2)) == (1, 0)
    assert passed("sst2", "released") == 1
    assert passed("sst2") == passed("sst2,trec") == 0  # both are remembered
    assert passed("sst2", batch_size=2) == 0  # decides nothing
    rows = (data / "sst2" / "test.jsonl").read_text().splitlines()
    (data / "sst2" / "test.jsonl").write_text("\n".join(rows[:-1]) + "\n")
    assert (passed("sst2"), passed("sst2")) == (1, 0)


def test_a_bad_checkpoint_does_not_hold_up_the_others(world: Path, tmp_path: Path) -> None:
    """It is marked with a reason, the next is evaluated, and the exit code tells."""
    run = tmp_path / "run"
    for step in (3, 4, 5):
        publish(world, run, step)
    _change(run / "step-000003" / "hf" / "model.safetensors", lambda b: b[:-9] + b"\x55" + b[-8:])
    partial = write_partial(world, run, 6)  # complete, and yet not a model
    (partial / "hf" / "config.json").write_text('{"model_type": "llama", "hidden_size": 48}')
    complete(partial)
    checkpoint.publish(run, 6)
    publish(world, run, 7)
    arguments = ["watch", run, "--once", "--tasks", "sst2", "--data", world / "data"]
    code, out, _ = command(*arguments)
    assert code == 1 and out.splitlines()[-1].endswith("2 failed (run-step-000003, run-step-000006)")
    states = ["failed", "evaluated", "evaluated", "failed", "evaluated"]
    assert [mark["state"] for mark in done(run).values()] == states
    code, out, _ = command(*arguments)  # not tried again, and not forgotten
    assert code == 1 and "0 evaluated" in out.splitlines()[-1] and "2 failed" in out.splitlines()[-1]
    shutil.rmtree(run / "step-000003")
    shutil.rmtree(run / "step-000006")
    publish(world, run, 3)
    assert command(*arguments)[0] == 0
    assert done(run)["run-step-000003"]["state"] == "evaluated"


def test_data_at_fault_are_not_a_checkpoints_fault(world: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    publish(world, run, 3)
    arguments = ["watch", run, "--once", "--tasks", "sst2", "--data"]
    assert command(*arguments, tmp_path / "nowhere")[0] == 2 and not done(run)
    assert command(*arguments, world / "data")[0] == 0


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), FailureError("a worker was killed")])
def test_a_passing_trouble_is_tried_again(
    error: Exception, world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    publish(world, run, 3)
    publish(world, run, 4)
    evaluate = watch_module.run_all

    def lost(model: Any, *arguments: Any) -> Any:
        if model.name.endswith("3"):
            raise error
        return evaluate(model, *arguments)

    arguments = ["watch", run, "--once", "--tasks", "sst2", "--data", world / "data"]
    with monkeypatch.context() as patch:
        patch.setattr(watch_module, "run_all", lost)
        code, out, _ = command(*arguments)
    assert code == 1 and "1 evaluated" in out and "1 to be tried again (run-step-000003)" in out
    assert list(done(run)) == ["run-step-000004"]
    code, out, _ = command(*arguments)
    assert code == 0 and "1 evaluated" in out


def test_pruned_while_it_is_evaluated(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer may delete a checkpoint at any moment: hard links keep the files until the end."""
    run = tmp_path / "run"
    publish(world, run, 3)
    evaluate = watch_module.run_all

    def prune_first(*arguments: Any) -> Any:
        checkpoint.remove(run / "step-000003")
        return evaluate(*arguments)

    monkeypatch.setattr(watch_module, "run_all", prune_first)
    assert watcher(world, run).once() == 1
    assert done(run)["run-step-000003"]["state"] == "evaluated"


def test_pruned_before_it_is_evaluated(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    publish(world, run, 3)
    listed = targets(run)
    checkpoint.remove(run / "step-000003")
    monkeypatch.setattr(targets_module, "targets", lambda run_dir: listed)
    assert watcher(world, run).once() == 0
    assert done(run)["run-step-000003"]["state"] == "gone"


def test_the_command_for_schedulers(world: Path, tmp_path: Path) -> None:
    """`watch --once`: a summary in the last line, exit code 0, a report; again: nothing to do, 0."""
    run = tmp_path / "run"
    arguments = ["watch", run, "--once", "--tasks", "sst2", "--data", world / "data"]
    assert command(*arguments)[0] == 2  # there is no such run
    publish(world, run, 3)
    publish(world, run, 9)
    for count in (2, 0):
        code, out, _ = command(*arguments)
        summary = f"{run}: {count} evaluated, 0 not ready or held elsewhere"
        assert (code, out.splitlines()[-1]) == (0, summary)
        assert "Accuracy over training" in (run / "eval" / "report.html").read_text()


def exports(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def test_every_checkpoint_is_exported_once(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between evaluation and export, and run again: everything is there, nothing twice, no row scored
    again. A card of the checkpoint is added to in the copy: what COMPLETE lists stays as it is.
    """
    run = tmp_path / "run"
    for step in (3, 4):
        partial = write_partial(world, run, step)
        (partial / HF / "README.md").write_text("---\nlicense: mit\n---\n# mine\n")
        complete(partial)
        checkpoint.publish(run, step)
    listed = checkpoint_files(run)
    places = [f"--export=lm-eval={tmp_path / 'lm'}", f"--export=hf={tmp_path / 'hf'}"]
    arguments = ["watch", run, "--once", "--tasks", "sst2", "--data", world / "data", *places]

    def killed(*arguments: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Export, "each", killed)
        assert command(*arguments)[0] == 130
    assert list(done(run)) == ["run-step-000003"] and not (tmp_path / "lm").exists()
    with monkeypatch.context() as patch:
        patch.setattr(watch_module, "run_all", lambda model, *a: run_all_but(3, model, *a))
        assert command(*arguments)[0] == 0
    actual = exports(tmp_path / "lm") | exports(tmp_path / "hf")
    names = [f"run-step-00000{step}" for step in (3, 4)]
    assert sorted(p.name for p in (tmp_path / "lm").iterdir()) == names
    assert (
        sum("/samples_sst2_" in path for path in actual) == sum("/results_" in path for path in actual) == 2
    )
    for name in names:
        card = actual[f"{name}/README.md"].decode()
        assert card.startswith("---\nlicense: mit\nmodel-index:\n") and card.endswith("---\n# mine\n")
    marks = exports(run / "eval" / "watch" / "exported")
    assert command(*arguments)[0] == 0 and marks == exports(run / "eval" / "watch" / "exported")
    assert actual == exports(tmp_path / "lm") | exports(tmp_path / "hf")
    assert listed == checkpoint_files(run)


def checkpoint_files(run: Path) -> dict[str, bytes]:
    return {name: text for name, text in exports(run).items() if name.startswith("step-")}


def run_all_but(step: int, model: Any, *arguments: Any) -> Any:
    """Evaluate, but for one checkpoint, which must not be evaluated again."""
    assert not model.name.endswith(str(step))
    return run_all(model, *arguments)


def test_an_export_that_fails_stops_nothing(world: Path, tmp_path: Path) -> None:
    """It is said, others are exported, the exit code tells, and the next pass tries it again."""
    run = tmp_path / "run"
    publish(world, run, 3)
    publish(world, run, 4)
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "run-step-000003").write_text("in the way")
    arguments = ["watch", run, "--once", "--tasks", "sst2", "--data", world / "data"]
    arguments += ["--export", f"hf={tmp_path / 'hf'}"]
    code, out, _ = command(*arguments)
    assert code == 1 and out.count("run-step-000003: not exported as hf=") == 1
    assert "2 evaluated" in out.splitlines()[-1] and "1 not exported (hf=" in out.splitlines()[-1]
    assert (tmp_path / "hf" / "run-step-000004" / "README.md").is_file()
    assert (run / "eval" / "report.html").is_file()
    (tmp_path / "hf" / "run-step-000003").unlink()
    code, out, _ = command(*arguments)
    assert code == 0 and "not exported" not in out
    assert (tmp_path / "hf" / "run-step-000003" / "README.md").is_file()


def test_wandb_waits_for_the_end_of_the_run(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two writers would spoil the run's lines there; `--until_finished` ends after both."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = tmp_path / "run"
    shutil.copytree(world / "models" / "4", run / "export")
    (run / "config.yaml").write_text("train: {report_to: [wandb], project: emo-test}\n")
    (run / "wandb-id").write_text("0123456789abcdef")
    settings, tasks = Settings(data=str(world / "data")), select_tasks("sst2")
    messages: list[str] = []
    watch = Watch(run, tasks, settings, run / "eval", "auto", messages.append, [Export("wandb", run)])
    with held(Lease(run, LOCK, LOCK_SECONDS)) as ours_first:
        assert ours_first and watch.once() == 1 and not watch.finished() and not watch.unexported
        assert watch.summary().endswith(f"wandb={run} waits for the end of the run")
        assert watch.once() == 0 and not watch.finished() and not list(run.glob("wandb/*.wandb"))
    assert watch.once() == 0 and watch.finished()
    assert len(list(run.glob("wandb/offline-run-*/*.wandb"))) == 1
    assert watch.once() == 0 and len([line for line in messages if "1 point of 1 model " in line]) == 1


@pytest.mark.parametrize("export", ["hf", "wandb=here", "csv=here", "lm-eval={run}/eval"])
def test_a_mistake_in_an_export_is_told_first(export: str, tmp_path: Path) -> None:
    (tmp_path / "eval" / "store").mkdir(parents=True)
    arguments = ["watch", tmp_path, "--once", "--data", "x", "--export", export.format(run=tmp_path)]
    code, out, err = command(*arguments)
    assert code == 2 and err.count("\n") == 1 and "evaluated" not in out
