"""Watching a run: every complete checkpoint exactly once, no other ever; its scheduler files.

EVAL_CRASHES sets the number of crashes (10).
"""

from __future__ import annotations

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

import pytest
import yaml

from emo.common.errors import ExitCode
from emo.eval import store
from emo.eval import watch as watch_module
from emo.eval.cli import parser
from emo.eval.export.commands import Export
from emo.eval.icl.job import Job
from emo.eval.icl.settings import Settings
from emo.eval.icl.tasks import select_tasks
from emo.eval.model import EvaluatedModel
from emo.eval.watch import FAILED, WAITING, Watch, targets
from emo.pipeline import checkpoint
from emo.pipeline.run_dir import HF, describe, list_files, partial_directory
from tests.conftest import REPO
from tests.helpers.evaluating import command, tiny_model, write_tasks
from tests.helpers.results import tree

CRASHES = int(os.environ.get("EVAL_CRASHES", "10"))
STEPS = 10
FORK = multiprocessing.get_context("fork")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Data, models of several steps, warm embeddings."""
    root = tmp_path_factory.mktemp("watch")
    write_tasks(root / "data", ["sst2"], train=20, test=12)
    for step in range(STEPS):
        tiny_model(root / "models" / f"{step}", seed=step, num_hidden_layers=1)
        facts = {"step": step, "tokens": 1000 * step, "objective": "emo", "run": "run"}
        (root / "models" / f"{step}" / "export.json").write_text(json.dumps(facts))
    return root


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


def watch(world: Path, run: Path, *options: object) -> tuple[int, str]:
    """The exit code and the output of one pass."""
    arguments = ["watch", run, "--once", "--tasks", "sst2", "--data", world / "data", *options]
    return command(*arguments)[:2]


def before_each(patch: pytest.MonkeyPatch, hook: Any) -> None:
    """Call `hook` with the model before every evaluation."""
    evaluate = watch_module.run_all
    patch.setattr(watch_module, "run_all", lambda model, *others: (hook(model), evaluate(model, *others))[1])


def watcher(world: Path, run: Path) -> Watch:
    settings = Settings(data=str(world / "data"))
    return Watch(run, select_tasks("sst2"), settings, run / "eval", "auto", lambda text: None)


def done(run: Path) -> dict[str, dict[str, Any]]:
    return {
        p.stem: json.loads(p.read_text()) for p in sorted((run / "eval" / "watch" / "done").glob("*.json"))
    }


def _loop(world: Path, run: Path, log: Path, count: int) -> None:
    """A watcher that stays until `count` checkpoints are done; a line in `log` for every chunk scored."""
    original = Job.score_rows

    def logged(self: Job, *arguments: Any) -> Any:
        records = original(self, *arguments)
        with log.open("a", encoding="utf-8") as file:
            file.write(f"{self.model.name}\n")
        return records

    Job.score_rows = logged  # type: ignore[method-assign]  # a fork: nobody else sees this
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
    workers: list[Any] = [None, None]
    while True:
        for i, worker in enumerate(workers):
            if worker is None or not worker.is_alive():
                workers[i] = FORK.Process(target=_loop, args=(world, run, log, STEPS))
                workers[i].start()
        if steps and rng.random() < 0.7:
            publish(world, run, steps.pop(0))
        time.sleep(rng.uniform(0.05, 0.3))
        if crashes < CRASHES and rng.random() < 0.6:
            victim = rng.choice(workers)
            os.kill(victim.pid, signal.SIGKILL)
            victim.join()
            crashes += 1
        if len(done(run)) == STEPS:
            break
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
    model = EvaluatedModel(str(world / "models" / str(STEPS - 1)))
    alone = Job(model, Settings(data=str(world / "data")), tmp_path / "alone")
    view = json.loads((run / "eval" / "models" / f"run-step-{STEPS - 1:06d}" / "sst2.json").read_text())
    assert view["result"] == alone.run(select_tasks("sst2")[0])  # its own model's
    assert not list((run / "eval" / "watch" / "pins").iterdir())


BROKEN = {
    "no COMPLETE": lambda c: (c / "COMPLETE").unlink(),
    "changed bytes": lambda c: (c / "hf" / "model.safetensors").write_bytes(b"1" * 999),
    "no export": lambda c: shutil.rmtree(c / "hf"),
}


@pytest.mark.parametrize("kind", list(BROKEN))
def test_a_torn_checkpoint_is_never_scored(kind: str, world: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    whole = publish(world, run, 3)
    BROKEN[kind](whole)
    watch = watcher(world, run)
    assert watch.once() == 0
    listed = kind == "changed bytes"  # otherwise it is not a checkpoint
    assert [facts["state"] for facts in done(run).values()] == ["failed"] * listed
    assert watch.among(FAILED) == ["run-step-000003"] * listed and not (run / "eval" / "models").exists()
    shutil.rmtree(whole)
    publish(world, run, 3)  # written again, whole
    assert watch.once() == 1 and not watch.among(FAILED)


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


def test_a_trainer_checkpoint_counts_when_it_rests(world: Path, tmp_path: Path) -> None:
    """Foreign runs have no marker: trainer_state.json, every shard of the index, none cut short, at rest.
    One that stays cut short has failed, so that `--until_finished` can end; what is written again counts.
    """
    run, name = tmp_path / "run", "run-checkpoint-5"
    path = Path(shutil.copytree(world / "models" / "5", run / "checkpoint-5"))
    weights, index = path / "model.safetensors", path / "model.safetensors.index.json"
    content, shards = weights.read_bytes(), [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]

    def passed(age: float = 60) -> Watch:
        for file in path.iterdir():
            os.utime(file, (time.time() - age,) * 2)
        watch = watcher(world, run)
        watch.once()
        return watch

    assert passed().among(WAITING) == [name]
    (path / "trainer_state.json").write_text("{}")
    assert passed(age=0).among(WAITING) == [name]
    text = json.dumps({"weight_map": dict(zip("ab", shards, strict=True))})
    weights.rename(path / shards[0])
    for listed in (text, text[:-4]):
        index.write_text(listed)
        assert passed().among(WAITING) == [name]
    index.unlink()
    for part in (content[:5], content[:-1]):
        weights.write_bytes(part)
        assert passed().among(WAITING) == [name]
    assert passed(3600).among(FAILED) == passed(3600).among(FAILED) == [name]
    weights.write_bytes(content)
    assert passed().evaluated == list(done(run)) == [name]


def test_other_tasks_or_settings_are_evaluated_anew(world: Path, tmp_path: Path) -> None:
    """A mark counts for the tasks, settings and data it was made with."""
    run, data = tmp_path / "run", write_tasks(tmp_path / "data", ["sst2", "trec"], train=20, test=8)
    publish(world, run, 3)

    def passed(tasks: str, version: str = "paper", **settings: Any) -> int:
        options = Settings(data=str(data), **settings)
        chosen = select_tasks(tasks, version)
        return Watch(run, chosen, options, run / "eval", "auto", lambda line: None).once()

    assert (passed("sst2"), passed("sst2")) == (1, 0)
    assert passed("sst2,trec") == passed("sst2", shots=2) == passed("sst2", "released") == 1
    assert passed("sst2") == passed("sst2,trec") == 0  # both are remembered
    assert passed("sst2", batch_size=2) == 0  # decides nothing
    rows = (data / "sst2" / "test.jsonl").read_text().splitlines()
    (data / "sst2" / "test.jsonl").write_text("\n".join(rows[:-1]) + "\n")
    assert (passed("sst2"), passed("sst2")) == (1, 0)


def test_a_bad_checkpoint_does_not_hold_up_the_others(world: Path, tmp_path: Path) -> None:
    """It is marked, the others are evaluated and reported, an exit code tells; missing data mark none."""
    run = tmp_path / "run"
    assert watch(world, run)[0] == 2  # there is no such run
    publish(world, run, 3)
    assert watch(world, run, "--data", tmp_path / "nowhere")[0] == 2 and not done(run)
    partial = write_partial(world, run, 6)  # complete, and yet not a model
    (partial / "hf" / "config.json").write_text('{"model_type": "llama", "hidden_size": 48}')
    complete(partial)
    checkpoint.publish(run, 6)
    publish(world, run, 7)
    for count in (2, 0):  # not tried again, and not forgotten
        code, out = watch(world, run)
        assert code == 1 and f"{count} evaluated" in out.splitlines()[-1] and "1 failed" in out
    assert [mark["state"] for mark in done(run).values()] == ["evaluated", "failed", "evaluated"]
    assert "Accuracy over training" in (run / "eval" / "report.html").read_text()
    shutil.rmtree(run / "step-000006")
    publish(world, run, 6)
    assert watch(world, run)[0] == 0 and done(run)["run-step-000006"]["state"] == "evaluated"


def test_a_passing_trouble_is_tried_again(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (3, 4):
        publish(world, run := tmp_path / "run", step)

    def lost(model: Any) -> None:
        if model.name.endswith("3"):
            raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        before_each(patch, lost)
        assert watch(world, run)[0] == 1
    assert list(done(run)) == ["run-step-000004"]
    assert watch(world, run)[0] == 0 and len(done(run)) == 2


def test_pruned_while_and_before_it_is_evaluated(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer may delete a checkpoint at any moment: hard links keep the files until the end."""
    steps = [publish(world, run := tmp_path / "run", step) for step in (3, 4)]
    listed = targets(run)
    before_each(monkeypatch, lambda model: [checkpoint.remove(step) for step in steps])
    monkeypatch.setattr(watch_module, "targets", lambda run_dir: listed)
    assert watcher(world, run).once() == 1
    assert [mark["state"] for mark in done(run).values()] == ["evaluated", "gone"]


def test_every_checkpoint_is_exported_once(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between evaluation and export, and run again: everything is there, nothing twice, no row scored
    again. An export that fails stops nothing.
    """
    run, names, scored = tmp_path / "run", ["run-step-000003", "run-step-000004"], list[str]()
    for step in (3, 4):
        publish(world, run, step)
    options = [f"--export=lm-eval={tmp_path / 'to'}", f"--export=hf={tmp_path / 'hf'}"]
    before_each(monkeypatch, lambda model: scored.append(model.name))
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(Export, "each", lambda *others: 1 / 0)
        watch(world, run, *options)
    assert list(done(run)) == names[:1] and not (tmp_path / "to").exists()
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / names[0]).write_text("in the way")
    assert watch(world, run, *options)[0] == 1
    assert list(done(run)) == names == scored and (tmp_path / "hf" / names[1] / "README.md").is_file()
    (tmp_path / "hf" / names[0]).unlink()
    marks = []
    for _ in range(2):
        assert watch(world, run, *options)[0] == 0
        files = list(tree(tmp_path / "to") | tree(tmp_path / "hf"))
        assert all(sum(kind in f for f in files) == 2 for kind in ("/samples_", "/results_", "README"))
        marks.append(tree(run / "eval" / "watch" / "exported"))
    assert marks[0] == marks[1]


@pytest.mark.parametrize("export", ["hf", "wandb=here", "csv=here"])
def test_a_mistake_in_an_export_is_told_first(export: str, tmp_path: Path) -> None:
    arguments = ["watch", tmp_path, "--once", "--data", "x", "--export", export]
    code, out, _ = command(*arguments)
    assert code == 2 and not out


SCRIPT = REPO / "launch/slurm/evaluate.sbatch"


def test_slurm_queues_again_only_what_may_pass(tmp_path: Path) -> None:
    """With stand-ins for Slurm's commands, which write down how they were called."""
    tools, log = tmp_path / "bin", tmp_path / "calls"
    tools.mkdir()
    stubs = {
        "srun": f'echo "$*" > {tmp_path}/asked; exit "$FAKE_CODE"',
        "scontrol": f'[ "$1" != show ] || exec echo "Command={SCRIPT} a"; echo "scontrol $*" >> {log}',
        "sbatch": f'echo "sbatch $*" >> {log}',
    }
    for name, body in stubs.items():
        (tools / name).write_text(f"#!/bin/bash\n{body}\n")
        (tools / name).chmod(0o755)
    # The script puts the checkout's own environment first; the stand-ins must win.
    copy = tmp_path / "slurm_script"
    copy.write_text(SCRIPT.read_text().replace("PATH=$repository/.venv/bin:$PATH", "PATH=$PATH"))

    def slurm(*arguments: object, **environment: str) -> tuple[int, list[str]]:
        log.unlink(missing_ok=True)
        environment |= {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
        words = ["bash", copy, *map(str, arguments)]
        done = subprocess.run(words, cwd=REPO, env=os.environ | environment, capture_output=True)
        return done.returncode, log.read_text().splitlines() if log.is_file() else []

    for ending, calls in ((ExitCode.FAILURE, ["scontrol requeue 7"]), (ExitCode.MISTAKE, [])):
        assert slurm(tmp_path, tmp_path, FAKE_CODE=str(ending)) == (ending, calls)
    assert slurm(tmp_path, tmp_path, FAKE_CODE="1", SLURM_RESTART_COUNT="5")[1] == []  # not for ever
    assert slurm(tmp_path, tmp_path, FAKE_CODE="2", EVERY="20")[1] == []
    [again] = slurm(tmp_path, tmp_path, FAKE_CODE="1", EVERY="20")[1]  # the next pass tries again
    early = tmp_path / "not-yet"  # training has not begun: a pass without work, and another one after it
    code, [call] = slurm(early, tmp_path, "--tasks", "sst2", FAKE_CODE="2", EVERY="20")
    assert code == 0 and call == f"sbatch --begin=now+20minutes {SCRIPT} {early} {tmp_path} --tasks sst2"
    assert again == f"sbatch --begin=now+20minutes {SCRIPT} {tmp_path} {tmp_path}"
    for _ in range(2):  # with the final export done there is no further pass
        code, called = slurm(tmp_path, tmp_path, FAKE_CODE="0", EVERY="20")
        assert (code, len(called)) == (0, int(not (tmp_path / "export").exists()))
        (tmp_path / "export").mkdir(exist_ok=True)
        store.replace(tmp_path / "eval/watch/done" / f"{tmp_path.name}.json", "{}")
    words = (tmp_path / "asked").read_text().split()
    assert str(parser().parse_args(words[words.index("emo") + 1 :]).run_dir) == str(tmp_path)


@pytest.mark.parametrize(("name", "once"), [("evaluate.yaml", True), ("watch.yaml", False)])
def test_kubernetes_runs_the_commands_there_are(name: str, once: bool) -> None:
    document = yaml.safe_load((REPO / "launch/k8s/base" / name).read_text())
    job = document["spec"].get("jobTemplate", document)["spec"]
    (container,) = job["template"]["spec"]["containers"]
    command = container["args"]
    if "command" in container:
        command = shlex.split(command[0].splitlines()[-1].removeprefix("exec launch/entrypoint.sh "))
    verb, *arguments = command
    assert verb == "watch"  # the image's, which is `emo watch`
    literals = yaml.safe_load((REPO / "launch/k8s/base/kustomization.yaml").read_text())
    for literal in literals["configMapGenerator"][0]["literals"]:
        setting, _, value = literal.partition("=")
        arguments = [re.sub(rf"\$\(?{setting}\b\)?", value, argument) for argument in arguments]
    parsed = parser().parse_args([verb, *arguments])
    assert (parsed.once, parsed.until_finished) == (once, not once)
    assert "$" not in f"{parsed.run_dir} {parsed.data}"
    codes = job["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"]
    assert codes == [ExitCode.MISTAKE, ExitCode.REGRESSION]  # everything else is tried again
