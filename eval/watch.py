"""Evaluate every checkpoint of a run exactly once, as it becomes complete; any number of watchers may run.

All state is files beside the results, so one pass (`--once`) from cron, a Kubernetes CronJob or Slurm and a
process that stays (`watch`) are the same thing:

    OUT/watch/done/NAME.json      evaluated, failed with a reason, or gone before it could be evaluated;
                                  whoever wants to be notified watches this directory
    OUT/watch/exported/NAME.json  as what, and where, its results were exported (--export)
    OUT/watch/seen/NAME.json      since when a checkpoint looks as it does
    OUT/watch/leases/             who is at it now
    OUT/watch/pins/NAME/          hard links to the files under evaluation: pruning cannot take them away

A mark counts for the files, tasks and settings it was made with: when one of them changes, the checkpoint is
evaluated again, and what is stored already is found. A checkpoint that fails does not hold up the others;
one that is not whole and has long stopped changing has failed.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from emo.common.errors import FailureError, UserError, one_line
from emo.common.lease import held, now_there
from emo.common.text import counted
from emo.eval import store, targets
from emo.eval.compare import Verdict, regression
from emo.eval.export.commands import Export
from emo.eval.export.hub import CARD
from emo.eval.export.tracking import BusyError
from emo.eval.icl.encoder import encoder_path
from emo.eval.icl.job import run_all
from emo.eval.icl.settings import VERSION, Settings
from emo.eval.icl.task_data import load_data
from emo.eval.icl.tasks import Task
from emo.eval.model import EvaluatedModel
from emo.eval.results import Model, pick, read_models
from emo.eval.targets import DamagedError, NotWholeError, Target
from emo.pipeline.run_dir import EXPORT

Say = Callable[[str], None]
STALE_SECONDS = 600.0  # what has not changed for so long is not written any more
PASSING = ("OutOfMemoryError", "AcceleratorError")  # of torch: the device, not the model


class Watch:
    """One watcher of one run."""

    def __init__(
        self,
        run_dir: Path,
        tasks: list[Task],
        settings: Settings,
        out: Path,
        dtype: str,
        say: Say,
        exports: Sequence[Export] = (),
    ) -> None:
        self.run_dir, self.tasks, self.settings, self.out = run_dir, tasks, settings, out
        self.dtype, self.say, self.exports = dtype, say, exports
        self.state = out / "watch"
        self.evaluated: list[str] = []  # by this watcher
        # Of the last pass, by name:
        self.waiting: dict[str, str] = {}  # not whole, or held by another watcher
        self.failed: dict[str, str] = {}  # cannot be evaluated as they are
        self.troubled: dict[str, str] = {}  # might be, at another time
        self.unexported: dict[str, str] = {}  # by export and name: why it failed
        self.deferred: set[str] = set()  # exports that wait for the end of the run
        self._reported: dict[str, str] = {}  # why a target is not ready, or not exported, as last reported

    def once(self) -> int:
        """Evaluate whatever is whole, not done and not held by another watcher; return how many were."""
        count, request = 0, self._request()
        self.waiting, self.failed, self.troubled = {}, {}, {}
        for target in targets.targets(self.run_dir):
            if self._settled(target, request):
                continue
            with held(store.lease(self.state / "leases", target.name)) as acquired:
                if not acquired:
                    self.waiting[target.name] = "held by another watcher"
                elif not self._settled(target, request) and self._attempt(target, request):
                    count += 1
                    self._export_all()
        if not count:
            self._export_all()
        return count

    def finished(self) -> bool:
        """Return whether the run has its final export and nothing is left to do, or to wait for."""
        request = self._request()
        settled = [self._settled(target, request) for target in targets.targets(self.run_dir)]
        return (self.run_dir / EXPORT).is_dir() and all(settled) and not self.deferred

    def summary(self) -> str:
        """Return the last pass in one line."""
        parts = [f"{len(self.evaluated)} evaluated", f"{len(self.waiting)} not ready or held elsewhere"]
        for word, names in (
            ("failed", self.failed), ("to be tried again", self.troubled), ("not exported", self.unexported),
        ):  # fmt: skip
            if names:
                parts.append(f"{len(names)} {word} ({', '.join(names)})")
        parts += [f"{name} waits for the end of the run" for name in sorted(self.deferred)]
        return f"{self.run_dir}: {', '.join(parts)}"

    def verdicts(self, baseline: str, max_drop: float | None) -> list[Verdict]:
        """Return verdicts on all evaluated checkpoints of the run, whoever evaluated them, and when."""
        models = read_models([self.out])
        first, by_name = pick(models, baseline), {model.name: model for model in models}
        return [
            regression(first, by_name[name], max_drop)
            if name in by_name
            else Verdict([], f"{name}: its results cannot be read", [f"all results ({name})"])
            for name in self._evaluated()
            if name != baseline
        ]

    def _evaluated(self) -> dict[str, dict[str, Any]]:
        """Return the marks of all that were evaluated, pruned since or not, by name."""
        marks = {path.stem: _read(path) for path in sorted((self.state / "done").glob("*.json"))}
        return {name: mark for name, mark in marks.items() if mark.get("state") == "evaluated"}

    def _export_all(self) -> None:
        """Export what is evaluated and was not exported since, also by watchers that were killed before they
        did. A failure is reported and tried again in the next pass; the other work goes on.
        """
        for export in self.exports:
            with held(store.lease(self.state / "leases", f"export-{export.format}")) as acquired:
                if acquired:
                    self._export(export)

    def _export(self, export: Export) -> None:
        others = (item for item in self.unexported.items() if not item[0].startswith(f"{export} "))
        self.unexported = dict(others)
        self.deferred.discard(str(export))
        evaluated = self._evaluated()
        marks = {name: self.state / "exported" / f"{name}.json" for name in evaluated}
        due = {}  # name -> version of the results
        for name, mark in evaluated.items():
            version = store.digest([mark.get("files"), mark.get("asked")])
            if _read(marks[name]).get(str(export)) != version:
                due[name] = version
        if not due:
            return
        models: dict[str, Model] = {}
        with contextlib.suppress(UserError):  # there are none any more
            models = {m.name: m for m in read_models([self.out], lambda text: None) if m.name in due}
        cards = {}
        for target in targets.targets(self.run_dir):
            with contextlib.suppress(OSError, UnicodeDecodeError):
                cards[target.name] = (target.path / CARD).read_text(encoding="utf-8")
        failed = {name: UserError(f"its results are not in {self.out}") for name in due.keys() - models}
        for name, error in (failed | export.each(list(models.values()), cards, self.say)).items():
            if isinstance(error, BusyError):
                self.deferred.add(str(export))
            else:
                reason = self.unexported[f"{export} {name}"] = _reason(error)
                text = f"{name}: not exported as {export}: {reason}; to be tried again"
                self._say_once(f"{export} {name}", text)
            due.pop(name)
        for name, version in due.items():
            store.replace(marks[name], store.dump(_read(marks[name]) | {str(export): version}))

    def _say_once(self, key: str, text: str) -> None:
        if self._reported.get(key) != text:
            self.say(text)
        self._reported[key] = text

    def _request(self) -> str:
        """Return the digest of what decides a result besides the model: tasks, settings, data, and scorer."""
        settings = asdict(self.settings)
        source, _ = settings.pop("data"), settings.pop("batch_size")
        tasks = []
        for task in self.tasks:
            facts = []  # none for data of the hub
            with contextlib.suppress(OSError):
                stats = [(p.name, p.stat()) for p in sorted((Path(source) / task.name).glob("*.jsonl*"))]
                facts = [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]
            spec = json.dumps(task.spec.model_dump(mode="json"))  # as text: the order of inputs counts
            tasks.append([task.name, task.version, spec, facts])
        return store.digest([tasks, settings, self.dtype, VERSION])[:16]

    def _mark(self, target: Target) -> Path:
        return self.state / "done" / f"{target.name}.json"

    def _settled(self, target: Target, request: str) -> bool:
        """Return whether a mark says that these files were evaluated as asked, or cannot be."""
        mark = _read(self._mark(target))
        state = mark["asked"].get(request) if mark.get("files") == target.fingerprint() else None
        if state is not None and state != "evaluated":
            self.failed[target.name] = state
        return state is not None

    def _set(self, target: Target, files: str, request: str, state: str, **facts: Any) -> None:
        """Write a target's mark; marks for the same files asked in other ways are kept."""
        path = self._mark(target)
        previous = _read(path)
        earlier = previous["asked"] if previous.get("files") == files else {}
        mark = {
            "name": target.name,
            "state": state if state in ("evaluated", "gone") else "failed",
            "files": files,
            "asked": earlier | {request: state},
        }
        store.replace(path, store.dump(mark | facts))

    def _attempt(self, target: Target, request: str) -> bool:
        """Evaluate a target whose lease is ours; return whether it was. What keeps it from it is noted."""
        files, name = target.fingerprint(), target.name
        unchanged = 0.0
        try:
            with _pinned(target.path, self.state / "pins" / name) as pinned:
                unchanged = self._unchanged(target, files)
                target.require_whole(pinned, unchanged >= targets.SETTLE_SECONDS)
                model = EvaluatedModel(str(pinned), name, self.dtype)
                model.given = str(target.path)
                results = run_all(model, self.tasks, self.settings, self.out, self.say)
                mean = sum(result["accuracy"] for result in results) / len(results)
                self._set(target, files, request, "evaluated", step=model.facts.get("step"), accuracy=mean)
            self.evaluated.append(name)
            self.say(f"{name}: mean accuracy {100 * mean:.1f} on {counted(len(results), 'task')}")
            return True
        except NotWholeError as error:
            if not target.path.is_dir():
                self._set(target, files, request, "gone")
                self.say(f"{name}: removed before it could be evaluated")
            elif unchanged >= STALE_SECONDS:
                reason = f"{error}, and nothing has changed for {unchanged / 60:.0f} minutes"
                self._fail(target, files, request, reason)
            else:
                self.waiting[name] = str(error)
                self._say_once(name, f"{name}: not ready: {error}")
        except Exception as error:
            reason = _reason(error)
            # A full disk, a lost mount, a device in use: the same evaluation may succeed later.
            passing = isinstance(error, OSError | FailureError) or type(error).__name__ in PASSING
            if passing or "CUDA error" in str(error):
                self.troubled[name] = reason
                self.say(f"{name}: {reason}; to be tried again")
            else:
                # Raises when data or retriever are at fault, so that no checkpoint is marked for them.
                for task in self.tasks:
                    load_data(task, self.settings.data, self.settings.limit, self.settings.shots)
                if self.settings.sentence_model is not None:
                    encoder_path(self.settings.sentence_model)
                self._fail(target, files, request, reason)
        return False

    def _fail(self, target: Target, files: str, request: str, reason: str) -> None:
        """Mark the target of the exception at hand as failed."""
        self.failed[target.name] = reason
        self._set(target, files, request, reason, reason=reason, traceback=traceback.format_exc())
        self.say(
            f"{target.name}: failed: {reason}; it is tried again when its files or the settings change, "
            f"or when {self._mark(target)} is removed"
        )

    def _unchanged(self, target: Target, files: str) -> float:
        """Return for how many seconds a target has looked like this, by its times or by what passes saw.

        What passes saw is for files whose times come from a clock that differs.
        """
        path = self.state / "seen" / f"{target.name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        now, before = now_there(path.parent), _read(path)
        since = before["since"] if before.get("files") == files else now
        store.replace(path, store.dump({"files": files, "since": since}))
        with contextlib.suppress(OSError, ValueError):
            newest = max(p.stat().st_mtime for p in target.path.iterdir())
            return max(now - since, min(now - newest, targets.SETTLE_SECONDS))
        return now - since


def _read(path: Path) -> dict[str, Any]:
    """Return the table in a file of the watch's state; empty when it is absent or torn."""
    value = store.read_json(path)
    return value if isinstance(value, dict) else {}


def _reason(error: Exception) -> str:
    """Return an error in one line, with its type unless it is meant to be read."""
    expected = isinstance(error, UserError | DamagedError)
    return one_line(error) if expected else f"{type(error).__name__}: {one_line(error)}"


@contextlib.contextmanager
def _pinned(path: Path, pin: Path) -> Iterator[Path]:
    """Yield a directory of hard links to the files of `path`; perhaps not all, if it is being removed.

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
