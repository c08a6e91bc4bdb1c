"""Evaluate every checkpoint of a run exactly once, as it becomes complete; any number of watchers may run.

All state is files beside the results, so one pass (`--once`) from cron, a Kubernetes CronJob or Slurm and a
process that stays (`watch`) are the same thing:

    OUT/watch/done/NAME.json      evaluated (or gone before it could be); written once, so that whoever wants
                                  to be notified watches this directory
    OUT/watch/leases/             who is at it now
    OUT/watch/pins/NAME/          hard links to the files under evaluation: pruning cannot take them away

A checkpoint counts when it is whole: ours when every file of its export has the size and hash that COMPLETE
lists; one of the Hugging Face Trainer when trainer_state.json and all weight files are there and unchanged
since the last look.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from common.errors import UserError
from eval import store
from eval.compare import pick, read_models, regression
from eval.icl.job import run_all
from eval.icl.settings import Settings
from eval.icl.tasks import Task
from eval.model import EvaluatedModel
from pipeline.run_dir import COMPLETE, EXPORT, HF, checkpoints

Say = Callable[[str], None]


@dataclass(frozen=True)
class Target:
    """Something to evaluate: its name in the results and the directory of the model's files."""

    name: str
    path: Path
    checkpoint: Path | None = None  # ours: holds COMPLETE
    foreign: bool = False  # the Hugging Face Trainer's

    def whole(self, files: Path, seen: dict[str, str]) -> bool:
        """Whether `files`, links to those of `path`, are a whole model.

        seen: what foreign checkpoints looked like at the last pass.
        """
        if self.foreign:
            look, before = _listing(self.path), seen.get(self.name)
            seen[self.name] = look
            return _trainer_finished(files) and before == look
        if self.checkpoint is None:  # the run's export appears by renaming, so it is whole
            return (files / "config.json").is_file()
        return _as_listed(self.checkpoint, files)


def targets(run_dir: Path) -> list[Target]:
    """What there is to evaluate in a run directory, oldest first; whether it is whole is asked later."""
    found = []
    for path in checkpoints(run_dir):
        if (path / HF).is_dir():
            found.append(Target(f"{run_dir.name}-{path.name}", path / HF, checkpoint=path))
    foreign = [p for p in run_dir.glob("checkpoint-*") if p.name[11:].isdigit() and p.is_dir()]
    for path in sorted(foreign, key=lambda p: int(p.name[11:])):
        found.append(Target(f"{run_dir.name}-{path.name}", path, foreign=True))
    if (run_dir / EXPORT).is_dir():
        found.append(Target(run_dir.name, run_dir / EXPORT))
    return found


def _as_listed(checkpoint: Path, files: Path) -> bool:
    """Whether the exported files have the sizes and hashes that COMPLETE lists."""
    try:
        listed = json.loads((checkpoint / COMPLETE).read_text())["files"]
        mine = {n.removeprefix(f"{HF}/"): facts for n, facts in listed.items() if n.startswith(f"{HF}/")}
        for name, facts in mine.items():
            if (files / name).stat().st_size != facts["size"]:
                return False
            with (files / name).open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != facts["sha256"]:
                    return False
        return bool(mine)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _trainer_finished(path: Path) -> bool:
    """Whether a Trainer checkpoint has its last file and every weight file of its index."""
    if not (path / "trainer_state.json").is_file() or not (path / "config.json").is_file():
        return False
    index = path / "model.safetensors.index.json"
    if not index.is_file():
        return (path / "model.safetensors").is_file()
    try:
        return all((path / name).is_file() for name in json.loads(index.read_text())["weight_map"].values())
    except (ValueError, KeyError):
        return False


def _listing(path: Path) -> str:
    """Names, sizes and times of a directory's files; empty when it is changing."""
    with contextlib.suppress(OSError):
        stats = [(p.name, p.stat()) for p in sorted(path.iterdir())]
        return store.digest([[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats])
    return ""


class Watch:
    """One watcher of one run."""

    def __init__(
        self, run_dir: Path, tasks: list[Task], settings: Settings, out: Path, dtype: str, say: Say
    ) -> None:
        if not run_dir.is_dir():
            raise UserError(f"run directory {run_dir} does not exist")
        self.run_dir, self.tasks, self.settings, self.out = run_dir, tasks, settings, out
        self.dtype, self.say = dtype, say
        self.state = out / "watch"
        self.seen: dict[str, str] = {}
        self.waiting = 0  # targets that somebody else is at, or that are not whole yet
        self.evaluated: list[str] = []

    def once(self) -> int:
        """Evaluate whatever is whole, not done and not held by another watcher; how many were."""
        count, self.waiting = 0, 0
        for target in targets(self.run_dir):
            done = self.state / "done" / f"{target.name}.json"
            if done.is_file():
                continue
            with store.held(store.Lease(self.state / "leases", target.name)) as mine:
                if not mine:
                    self.waiting += 1
                elif not done.is_file():
                    count += self._evaluate(target, done)
        return count

    def _evaluate(self, target: Target, done: Path) -> int:
        """Evaluate a target whose lease is ours. 0 when it is not whole yet or gone."""
        with _pinned(target.path, self.state / "pins" / target.name) as files:
            if not target.whole(files, self.seen):
                if target.path.is_dir():
                    self.waiting += 1
                elif store.publish(done, store.dump({"name": target.name, "state": "gone"})):
                    self.say(f"{target.name}: removed before it could be evaluated")
                return 0
            model = EvaluatedModel(str(files), target.name, self.dtype)
            model.given = str(target.path)
            results = run_all(model, self.tasks, self.settings, self.out, self.say)
        mean = sum(r["accuracy"] for r in results) / len(results)
        facts = {"name": target.name, "state": "evaluated", "step": model.facts.get("step"), "accuracy": mean}
        if store.publish(done, store.dump(facts)):
            self.evaluated.append(target.name)
        self.say(f"{target.name}: mean accuracy {100 * mean:.1f} on {len(results)} tasks")
        return 1

    def finished(self) -> bool:
        """Whether the run has its final export and nothing is left to do."""
        names = [t.name for t in targets(self.run_dir)]
        done = all((self.state / "done" / f"{name}.json").is_file() for name in names)
        return (self.run_dir / EXPORT).is_dir() and done

    def regressions(self, baseline: str, max_drop: float | None) -> list[str]:
        """Verdicts on the models evaluated by this watcher that are worse than `baseline`."""
        models = read_models([self.out])
        first = pick(models, baseline)
        verdicts = [
            regression(first, pick(models, name), max_drop) for name in self.evaluated if name != baseline
        ]
        return [v.summary for v in verdicts if v.regressions]


@contextlib.contextmanager
def _pinned(path: Path, pin: Path) -> Iterator[Path]:
    """A directory of hard links to the files of `path`; perhaps not all of them, if it is being removed.

    Where there can be no links (another file system) it is `path` itself; its removal ends the evaluation.
    """
    shutil.rmtree(pin, ignore_errors=True)
    pin.mkdir(parents=True)
    used = pin
    try:
        for file in sorted(p for p in path.iterdir() if p.is_file()):
            os.link(file, pin / file.name)
    except FileNotFoundError:
        pass  # what is missing is noticed when the files are checked
    except OSError:
        used = path
    try:
        yield used
    finally:
        shutil.rmtree(pin, ignore_errors=True)
