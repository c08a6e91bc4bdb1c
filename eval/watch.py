"""Evaluate every checkpoint of a run exactly once, as it becomes complete; any number of watchers may run.

Our checkpoints are whole when every file of their export has the size and hash that COMPLETE lists. The run's
export appears by renaming, so it is whole. A checkpoint of the Hugging Face Trainer has no such marker: it
counts when trainer_state.json, the configuration and every weight file of the index are there, the weight
files are as long as their own headers say, and nothing has changed for SETTLE_SECONDS.

All state is files beside the results, so one pass (`--once`) from cron, a Kubernetes CronJob or Slurm and a
process that stays (`watch`) are the same thing:

    OUT/watch/done/NAME.json      evaluated, failed with a reason, or gone before it could be evaluated;
                                  whoever wants to be notified watches this directory
    OUT/watch/exported/NAME.json  formats and directories that its results were exported to (--export)
    OUT/watch/leases/             the watchers at work
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
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from emo.common.errors import FailureError, UserError, one_line
from emo.common.io.lease import file_system_now, hold_if_free
from emo.common.io.weights import CONFIG, opened_files
from emo.common.text import counted
from emo.pipeline.control.run_dir import (
    COMPLETE,
    EXPORT,
    HF,
    checkpoints,
    is_complete,
    listed_files,
    mismatch,
)

from .export.commands import Export
from .export.hub import CARD
from .export.tracking import BusyError
from .icl.encoder import encoder_path
from .icl.job import run_all
from .icl.settings import VERSION, Settings
from .icl.task_data import load_data
from .icl.tasks import Task
from .model import EvaluatedModel, clean_name
from .results import store
from .results.compare import Verdict, levels, regression
from .results.directory import Say, natural, pick, read_models

SETTLE_SECONDS = 20.0
STALE_SECONDS = 600.0  # files that have not changed for so long are not being written any more
TRAINER_STATE = "trainer_state.json"
FOREIGN = "checkpoint-"  # how the Trainer names its checkpoints, before the step
PASSING = ("OutOfMemoryError", "AcceleratorError")  # of torch: the device, not the model
# States of a target, or of the export of one, that is not done.
WAITING, FAILED, TROUBLED = "not ready or held elsewhere", "failed", "to be tried again"
UNEXPORTED, DEFERRED = "not exported", "for the end of the run"


class NotWholeError(Exception):
    """Files are missing or still being written; they may be whole later."""


@dataclass(frozen=True)
class Target:
    """A model to evaluate: its name in the results and the directory of its files."""

    name: str
    path: Path
    checkpoint: Path | None = None  # ours: holds COMPLETE
    foreign: bool = False  # the Hugging Face Trainer's

    def fingerprint(self) -> str:
        """Return a digest that changes when the files do, without reading them; empty when they are gone."""
        with contextlib.suppress(OSError):
            files = [path for path in sorted(self.path.iterdir()) if path.is_file()]
            return store.digest(_looks(files + ([self.checkpoint / COMPLETE] if self.checkpoint else [])))
        return ""

    def require_whole(self, files: Path, settled: bool) -> None:
        """Check `files`, links to those of `path`. settled: nothing has changed there for long enough.

        NotWholeError when they may be whole later, UserError when they will not.
        """
        if self.checkpoint is not None:
            listed = listed_files(self.checkpoint) or {}
            exported = {n.removeprefix(f"{HF}/"): f for n, f in listed.items() if n.startswith(f"{HF}/")}
            fault = f"{COMPLETE} is unreadable or lists no file of {HF}/"
            if (reason := mismatch(files, exported) if exported else fault) is not None:
                if not is_complete(self.checkpoint):
                    raise NotWholeError(f"{COMPLETE} was removed")  # it is being pruned
                raise UserError(reason)
            return
        for name in (CONFIG, TRAINER_STATE) if self.foreign else (CONFIG,):
            if not (files / name).is_file():
                raise NotWholeError(f"{name} is missing")
        try:
            opened = opened_files(files) if self.foreign else []
        except (OSError, ValueError, UserError) as error:
            raise NotWholeError(one_line(error, 200)) from None
        for path in opened:  # has it all the bytes that its header, or a zip file's end, promises?
            whole = path.suffix not in (".bin", ".safetensors") or zipfile.is_zipfile(path)
            with contextlib.suppress(OSError, SafetensorError), safe_open(path, framework="np"):
                whole = True
            if not whole:
                raise NotWholeError(f"{path.name} is cut short")
        if self.foreign and not settled:
            raise NotWholeError(f"it changed less than {SETTLE_SECONDS:g} s ago")


def targets(run_dir: Path) -> list[Target]:
    """Return the models to evaluate in a run directory, oldest first, whether they are whole or not."""
    result, run = [], clean_name(run_dir.absolute().name)  # `.` has no name of its own
    for path in checkpoints(run_dir):
        if (path / HF).is_dir():
            result.append(Target(f"{run}-{path.name}", path / HF, checkpoint=path))
    foreign = {p.name.removeprefix(FOREIGN): p for p in run_dir.glob(f"{FOREIGN}*") if p.is_dir()}
    for _, path in sorted((int(step), path) for step, path in foreign.items() if step.isdecimal()):
        result.append(Target(f"{run}-{path.name}", path, foreign=True))
    if (run_dir / EXPORT).is_dir():
        result.append(Target(run, run_dir / EXPORT))
    return result


def _looks(files: Iterable[Path]) -> list[tuple[str, int, int]]:
    """Return name, size and time of the last change of files."""
    stats = [(path.name, path.stat()) for path in files]
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]


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
        self.directory = out / "watch"
        self.evaluated: list[str] = []  # by this watcher
        self.states: dict[str, str] = {}  # of the last pass, by target, or by export and target
        self._lines: dict[str, str] = {}  # likewise: the last line about it

    def once(self) -> int:
        """Evaluate whatever is whole, not done and not held by another watcher; return how many were."""
        count, request = 0, self._request()
        self.states = {}
        for target in targets(self.run_dir):
            if self._settled(target, request):
                continue
            with hold_if_free(store.lease(self.directory / "leases", target.name)) as acquired:
                if not acquired:
                    self.states[target.name] = WAITING
                elif not self._settled(target, request) and self._attempt(target, request):
                    count += 1
                    self._export_all()
        if not count:
            self._export_all()
        return count

    def among(self, *states: str) -> list[str]:
        """Return the targets and exports that the last pass left in one of these states."""
        return [name for name, state in self.states.items() if state in states]

    def finished(self) -> bool:
        """Return whether the run has its final export and nothing is left to do, or to wait for."""
        request = self._request()
        settled = [self._settled(target, request) for target in targets(self.run_dir)]
        return (self.run_dir / EXPORT).is_dir() and all(settled) and not self.among(DEFERRED)

    def summary(self) -> str:
        """Return the last pass in one line."""
        parts = [f"{len(self.evaluated)} evaluated"]
        for state in (WAITING, FAILED, TROUBLED, UNEXPORTED, DEFERRED):
            if names := self.among(state):
                parts.append(f"{len(names)} {state} ({', '.join(names)})")
        if bare := sum(not (path / HF).is_dir() for path in checkpoints(self.run_dir)):
            have = f"{counted(bare, 'checkpoint')} {'has' if bare == 1 else 'have'} no export"
            parts.append(f"{have}; set train.export_checkpoints=true to evaluate checkpoints")
        return f"{self.run_dir}: {', '.join(parts)}"

    def verdicts(self, baseline: str, max_drop: float | None) -> list[Verdict]:
        """Return verdicts on all evaluated checkpoints of the run, whoever evaluated them, and when.

        Their tests share one level, as `compare.levels` says: the more are judged, the more false alarms.
        """
        models = read_models([self.out])
        first, by_name = pick(models, baseline), {model.name: model for model in models}
        marks, export = self._evaluated(), clean_name(self.run_dir.absolute().name)
        names = [name for name in marks if name != baseline]
        # The export comes last: its step is that of the last checkpoint.
        names.sort(key=lambda name: (name == export, marks[name].get("step") or 0, natural(name)))
        final = names.index(export) if export in names else None
        return [
            regression(first, by_name[name], max_drop, alpha=alpha)
            if name in by_name
            else Verdict([], f"{name}: its results cannot be read", [f"all results ({name})"])
            for name, alpha in zip(names, levels(len(names), final), strict=True)
        ]

    def _evaluated(self) -> dict[str, dict[str, Any]]:
        """Return the marks of all that were evaluated, pruned since or not, by name."""
        marks = {path.stem: _read(path) for path in sorted((self.directory / "done").glob("*.json"))}
        return {name: mark for name, mark in marks.items() if mark.get("state") == "evaluated"}

    def _export_all(self) -> None:
        """Export what is evaluated and was not exported since, also by watchers that were killed before they
        did. A failure is reported and tried again in the next pass; the other work goes on.
        """
        for export in self.exports:
            with hold_if_free(store.lease(self.directory / "leases", f"export-{export.format}")) as acquired:
                if acquired:
                    self._export(export)

    def _export(self, export: Export) -> None:
        self.states = {name: s for name, s in self.states.items() if not name.startswith(f"{export} ")}
        due = {}  # name -> version of the results
        marks = self.directory / "exported"
        for name, mark in self._evaluated().items():
            version = store.digest([mark.get("files"), mark.get("asked")])
            if _read(marks / f"{name}.json").get(str(export)) != version:
                due[name] = version
        if not due:
            return
        models, cards = [], {}
        with contextlib.suppress(UserError):  # there are none any more
            models = [m for m in read_models([self.out], lambda text: None) if m.name in due]
        for target in targets(self.run_dir):
            with contextlib.suppress(OSError, UnicodeDecodeError):
                cards[target.name] = (target.path / CARD).read_text(encoding="utf-8")
        lost = due.keys() - {model.name for model in models}
        failed: dict[str, Exception] = {n: UserError(f"its results are not in {self.out}") for n in lost}
        failed |= export.each(models, cards, self.say)
        for name, error in failed.items():
            self.states[f"{export} {name}"] = DEFERRED if isinstance(error, BusyError) else UNEXPORTED
            if not isinstance(error, BusyError):
                text = f"{name}: not exported as {export}: {_reason(error)}; to be tried again"
                self._say_once(f"{export} {name}", text)
        for name in due.keys() - failed:
            path = marks / f"{name}.json"
            store.replace(path, store.dump(_read(path) | {str(export): due[name]}))

    def _say_once(self, key: str, text: str) -> None:
        if self._lines.get(key) != text:
            self.say(text)
        self._lines[key] = text

    def _request(self) -> str:
        """Return the digest of what decides a result besides the model: tasks, settings, data, and scorer."""
        settings = asdict(self.settings)
        source, _ = settings.pop("data"), settings.pop("batch_size")
        tasks = []
        for task in self.tasks:
            facts = list[tuple[str, int, int]]()  # none for data of the hub
            with contextlib.suppress(OSError):
                facts = _looks(sorted((Path(source) / task.name).glob("*.jsonl*")))
            spec = json.dumps(task.spec.model_dump(mode="json"))  # as text: the order of inputs counts
            tasks.append([task.name, task.version, spec, facts])
        return store.digest([tasks, settings, self.dtype, VERSION])[:16]

    def _settled(self, target: Target, request: str) -> bool:
        """Return whether a mark says that these files were evaluated as asked, or cannot be."""
        mark = _read(self.directory / "done" / f"{target.name}.json")
        state = mark["asked"].get(request) if mark.get("files") == target.fingerprint() else None
        if state is not None and state != "evaluated":
            self.states[target.name] = FAILED
        return state is not None

    def _set(self, target: Target, files: str, request: str, state: str, **facts: Any) -> None:
        """Write a target's mark; marks for the same files asked in other ways are kept."""
        path = self.directory / "done" / f"{target.name}.json"
        before = _read(path)
        earlier = before["asked"] if before.get("files") == files else {}
        mark = {
            "name": target.name,
            "state": state if state in ("evaluated", "gone") else "failed",
            "files": files,
            "asked": earlier | {request: state},
        }
        store.replace(path, store.dump(mark | facts))

    def _attempt(self, target: Target, request: str) -> bool:
        """Evaluate a target whose lease is ours; return whether it was. What keeps it from it is noted."""
        files, name, unchanged, failure = target.fingerprint(), target.name, 0.0, ""
        trace = None
        try:
            with _pinned(target.path, self.directory / "pins" / name) as pinned:
                now = file_system_now(self.directory)
                unchanged = now - max((path.stat().st_mtime for path in pinned.glob("*")), default=now)
                target.require_whole(pinned, unchanged >= SETTLE_SECONDS)
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
            elif unchanged < STALE_SECONDS:
                self.states[name] = WAITING
                self._say_once(name, f"{name}: not ready: {error}")
            else:
                failure = f"{error}, and nothing has changed for {unchanged / 60:.0f} minutes"
        except Exception as error:
            failure, trace = _reason(error), traceback.format_exc()
            # A full disk, a lost mount, a device in use: the same evaluation may succeed later.
            passing = isinstance(error, OSError | FailureError) or type(error).__name__ in PASSING
            if passing or "CUDA error" in str(error):
                self.states[name] = TROUBLED
                self.say(f"{name}: {failure}; to be tried again")
                return False
            # Raises when data or retriever are at fault, so that no checkpoint is marked for them.
            for task in self.tasks:
                load_data(task, self.settings.data, self.settings.limit, self.settings.shots)
            if self.settings.sentence_model is not None:
                encoder_path(self.settings.sentence_model)
        if failure:
            self.states[name] = FAILED
            self._set(target, files, request, failure, reason=failure, traceback=trace)
            self.say(f"{name}: failed: {failure}; it is tried again when its files or the settings change")
        return False


def _read(path: Path) -> dict[str, Any]:
    """Return the table in a file of the watch's state; empty when it is absent or torn."""
    return store.read_json(path) or {}


def _reason(error: Exception) -> str:
    """Return an error in one line, with its type unless it is meant to be read."""
    line = one_line(error)
    return line if isinstance(error, UserError) else f"{type(error).__name__}: {line}"


@contextlib.contextmanager
def _pinned(path: Path, pin: Path) -> Iterator[Path]:
    """Yield a directory of hard links to the files of `path`.

    Where there can be no links (another file system), or it is being removed, it is `path` itself.
    """
    shutil.rmtree(pin, ignore_errors=True)
    try:
        with contextlib.suppress(OSError):
            shutil.copytree(path, pin, copy_function=os.link)
            path = pin
        yield path
    finally:
        shutil.rmtree(pin, ignore_errors=True)
