"""Evaluate every checkpoint of a run once, as soon as it is complete. Several watchers may run at once.

This project's checkpoints are complete if every file of their export has the size and hash that COMPLETE
lists. The run's export is renamed into place, so it is complete. A checkpoint of the Hugging Face Trainer has
no such marker. It counts as complete if trainer_state.json, the configuration and every weight file of the
index exist, if the weight files are as long as their headers say, and if nothing has changed for
SETTLE_SECONDS.

All state is in files next to the results, so a single pass (`--once`) from cron, Slurm or a Kubernetes
CronJob is equivalent to a process that stays:

    OUT/watch/done/NAME.json      evaluated, failed with a reason, or removed before it could be evaluated.
    Watch this
                                  directory for notifications.
    OUT/watch/exported/NAME.json  formats and directories that its results were exported to (--export)
    OUT/watch/leases/             the active watchers
    RUN_DIR/eval/watch/finished   whether the final export exists and no work was left after the last pass
    RUN_DIR/task_scores.jsonl     the accuracies of this project's checkpoints, for train.keep_best=task:NAME
    OUT/watch/pins/NAME/          hard links to the files under evaluation, so that pruning cannot remove them

A mark has the latest settings of each task, whose results are in the results directory. When files, tasks or
settings change, the checkpoint is evaluated again, reusing stored results. A checkpoint that fails does not
block the others. A checkpoint that is incomplete and stopped changing long ago has failed.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import traceback
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from emo.common.errors import FailureError, UserError, one_line
from emo.common.io.lease import hold_if_free
from emo.common.io.lease_files import file_system_now
from emo.common.io.weights import ADAPTER, ADAPTER_FILE, CONFIG, has_only_adapter, opened_files
from emo.common.text import counted
from emo.pipeline.control.run_dir import (
    COMPLETE,
    EXPORT,
    HF,
    append_scores,
    checkpoint_digest,
    checkpoints,
    is_complete,
    listed_files,
    mismatch,
    step_of,
)

from .export.commands import Export
from .export.hub import CARD
from .export.tracking import BusyError
from .icl.job import mean_accuracy, run_all
from .icl.settings import VERSION, Settings
from .icl.task_data import load_data
from .icl.tasks import ForeignTask, Task
from .models.encoder import encoder_path
from .models.model import EvaluatedModel, clean_name
from .report.compare import Verdict, checkpoint_levels, find_regression
from .results import store
from .results.directory import Say, TaskResult, find_model, natural_key, read_models

SETTLE_SECONDS = 20.0
STALE_SECONDS = 600.0  # files that have not changed for this long are no longer being written
PINS = "pins"  # directories of links to the files of targets
FINISHED = Path("eval", "watch", "finished")  # whatever the name of the run or --output_path
TRAINER_STATE = "trainer_state.json"
FOREIGN = "checkpoint-"  # prefix of the Trainer's checkpoints, followed by the step
TRANSIENT = ("OutOfMemoryError", "AcceleratorError")  # errors of torch about the device, not the model
# States of a target, or of its export, that is not done.
EVALUATED = "evaluated"
WAITING = "not ready or held by another watcher"
FAILED = "failed"
TROUBLED = "to be retried"
UNEXPORTED = "not exported"
UNSENT = "not exported yet"  # because of an error that may pass
DEFERRED = "waiting for the end of the run"


Requests = dict[str, str]  # by task: the digest of everything but the model that affects its result


class IncompleteError(Exception):
    """Files are missing or still being written. They may be complete later."""


class FileStat(NamedTuple):
    """A file's name, size in bytes, and time of the last change."""

    name: str
    size: int
    changed: int


@dataclass(frozen=True)
class Target:
    """A model to evaluate: its name in results and the directory of its files."""

    name: str
    path: Path
    checkpoint: Path | None = None  # this project's checkpoint, which contains COMPLETE
    foreign: bool = False  # a checkpoint of the Hugging Face Trainer

    def fingerprint(self) -> str:
        """Return a digest that changes with the files, without reading them. It is "" if they are gone."""
        with contextlib.suppress(OSError):
            files = [path for path in sorted(self.path.iterdir()) if path.is_file()]
            return store.digest_json(
                _stat_files(files + ([self.checkpoint / COMPLETE] if self.checkpoint else []))
            )
        return ""

    def require_complete(self, files: Path, settled: bool) -> None:
        """Check that the files are complete.

        Raises IncompleteError if they may become complete, and UserError if they will not.

        Args:
            files: Links to the files of `path`.
            settled: Whether nothing has changed for SETTLE_SECONDS.
        """
        if self.checkpoint is not None:
            self._require_listed(self.checkpoint, files)
            return
        adapter = has_only_adapter(files)
        names = [ADAPTER, ADAPTER_FILE] if adapter else [CONFIG]
        for name in [*names, TRAINER_STATE] if self.foreign else names:
            if not (files / name).is_file():
                raise IncompleteError(f"{name} is missing")
        try:
            read = []
            if self.foreign:
                read = [files / ADAPTER_FILE] if adapter else opened_files(files)
        except (OSError, ValueError, UserError) as error:
            raise IncompleteError(one_line(error, 200)) from None
        for path in read:  # check the length that the header, or the end of a zip file, states
            complete = path.suffix not in (".bin", ".safetensors") or zipfile.is_zipfile(path)
            with contextlib.suppress(OSError, SafetensorError), safe_open(path, framework="np"):
                complete = True
            if not complete:
                raise IncompleteError(f"{path.name} is truncated")
        if self.foreign and not settled:
            raise IncompleteError(f"it changed less than {SETTLE_SECONDS:g} s ago")

    @staticmethod
    def _require_listed(checkpoint: Path, files: Path) -> None:
        listed = listed_files(checkpoint) or {}
        exported = {n.removeprefix(f"{HF}/"): f for n, f in listed.items() if n.startswith(f"{HF}/")}
        fault = f"{COMPLETE} is unreadable or lists no file of {HF}/"
        if (reason := mismatch(files, exported) if exported else fault) is not None:
            if not is_complete(checkpoint):
                raise IncompleteError(f"{COMPLETE} was removed")  # it is being pruned
            raise UserError(reason, code="checkpoint-damaged")


def find_targets(run_dir: Path) -> list[Target]:
    """Return the models in a run directory, oldest first, complete or not."""
    result = []
    run = clean_name(run_dir.absolute().name)  # `.` has no name
    for path in checkpoints(run_dir):
        if (path / HF).is_dir():
            result.append(Target(f"{run}-{path.name}", path / HF, checkpoint=path))
    foreign = {p.name.removeprefix(FOREIGN): p for p in run_dir.glob(f"{FOREIGN}*") if p.is_dir()}
    for _, path in sorted((int(step), path) for step, path in foreign.items() if step.isdecimal()):
        result.append(Target(f"{run}-{path.name}", path, foreign=True))
    if (run_dir / EXPORT).is_dir():
        result.append(Target(run, run_dir / EXPORT))
    return result


def _stat_files(files: Iterable[Path]) -> list[FileStat]:
    stats = [(path.name, path.stat()) for path in files]
    return [FileStat(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]


class RunWatcher:
    """A watcher of one run."""

    def __init__(
        self, run_dir: Path, tasks: Sequence[Task | ForeignTask], settings: Settings, out: Path, dtype: str,
        say: Say, exports: Sequence[Export] = (),
    ) -> None:  # fmt: skip
        self.run_dir = run_dir
        self.tasks = tasks
        self.settings = settings
        self.out = out
        self.dtype = dtype
        self.say = say
        self.exports = exports
        self.directory = out / "watch"
        self.evaluated: list[str] = []  # by this watcher
        self.states: dict[str, str] = {}  # of the last pass, by target, or by export and target
        self._lines: dict[str, str] = {}  # the last line about each of them

    def run_once(self) -> int:
        """Evaluate all complete targets that are neither done nor held. Return their number."""
        count = 0
        requests = self._requests()
        self.states = {}
        self._remove_pins()
        for target in find_targets(self.run_dir):
            if self._is_done(target, requests):
                continue
            with hold_if_free(store.lease(self.directory / "leases", target.name)) as acquired:
                if not acquired:
                    self.states[target.name] = WAITING
                elif not self._is_done(target, requests) and self._attempt(target, requests):
                    count += 1
                    self._export_all()
        if not count:
            self._export_all()
        marker = self.run_dir / FINISHED
        with contextlib.suppress(OSError):  # the run may be another user's
            if self.finished():
                marker.parent.mkdir(parents=True, exist_ok=True)
                marker.touch()
            else:
                marker.unlink(missing_ok=True)
        return count

    def _remove_pins(self) -> None:
        """Remove the links of watchers that were killed, to checkpoints that training has deleted since."""
        targets = {target.name for target in find_targets(self.run_dir)}
        for pin in (self.directory / PINS).glob("*"):
            if pin.name not in targets:
                with hold_if_free(store.lease(self.directory / "leases", pin.name)) as acquired:
                    if acquired:
                        shutil.rmtree(pin, ignore_errors=True)

    def names_in(self, *states: str) -> list[str]:
        """Return the targets and exports that have one of these states after the last pass."""
        return [name for name, state in self.states.items() if state in states]

    def finished(self) -> bool:
        """Return whether the run has its final export and no work is left."""
        requests = self._requests()
        done = [self._is_done(target, requests) for target in find_targets(self.run_dir)]
        return (self.run_dir / EXPORT).is_dir() and all(done) and not self.names_in(DEFERRED, UNSENT)

    def summary(self) -> str:
        """Return a line about the last pass."""
        parts = [f"{len(self.evaluated)} evaluated"]
        for state in (WAITING, FAILED, TROUBLED, UNEXPORTED, UNSENT, DEFERRED):
            if names := self.names_in(state):
                parts.append(f"{len(names)} {state} ({', '.join(names)})")
        if bare := sum(not (path / HF).is_dir() for path in checkpoints(self.run_dir)):
            have = f"{counted(bare, 'checkpoint')} {'has' if bare == 1 else 'have'} no export"
            parts.append(f"{have} (set train.export_checkpoints=true to evaluate checkpoints)")
        return f"{self.run_dir}: {', '.join(parts)}"

    def verdicts(self, baseline: str, max_drop: float | None) -> list[Verdict]:
        """Return verdicts on all checkpoints of the run that were evaluated by these settings.

        Checkpoints of earlier passes and other watchers count, too. The tests share one level
        (`checkpoint_levels`), because every test may be a false alarm.
        """
        models = read_models([self.out])
        first = find_model(models, baseline)
        by_name = {model.name: model for model in models}
        requests = self._requests()
        export = clean_name(self.run_dir.absolute().name)
        own = (f"{export}-step-", f"{export}-{FOREIGN}")  # results may be shared by several runs
        marks = {
            name: mark
            for name, mark in self._evaluated_marks().items()
            if (name == export or name.startswith(own)) and _states(mark, requests) == {EVALUATED}
        }
        names = [name for name in marks if name != baseline]
        # The export is last, because it has the step of the last checkpoint.
        names.sort(key=lambda name: (name == export, marks[name].get("step") or 0, natural_key(name)))
        final = names.index(export) if export in names else None
        return [
            find_regression(first, by_name[name], max_drop, alpha=alpha)
            if name in by_name
            else Verdict([], f"{name}: its results cannot be read", [f"all results ({name})"])
            for name, alpha in zip(names, checkpoint_levels(len(names), final), strict=True)
        ]

    def _evaluated_marks(self) -> dict[str, dict[str, Any]]:
        """Return the marks of all evaluated targets by name, including targets that were pruned since."""
        marks = {path.stem: _read_mark(path) for path in sorted((self.directory / "done").glob("*.json"))}
        return {name: mark for name, mark in marks.items() if mark.get("state") == EVALUATED}

    def _export_all(self) -> None:
        """Export new results, including those of watchers that were killed before exporting.

        A failure is reported and retried in the next pass. It does not stop other work.
        """
        for export in self.exports:
            with hold_if_free(store.lease(self.directory / "leases", f"export-{export.format}")) as acquired:
                if acquired:
                    self._export(export)

    def _export(self, export: Export) -> None:
        self.states = {name: s for name, s in self.states.items() if not name.startswith(f"{export} ")}
        marks = self.directory / "exported"
        due = {}  # name -> version of the results
        for name, mark in self._evaluated_marks().items():
            version = store.digest_json([mark.get("files"), mark.get("asked")])
            if _read_mark(marks / f"{name}.json").get(str(export)) != version:
                due[name] = version
        if not due:
            return
        failed = self._export_models(export, due)
        for name, error in failed.items():
            mistake = isinstance(error, UserError) and not isinstance(error, FailureError)
            state = DEFERRED if isinstance(error, BusyError) else UNEXPORTED if mistake else UNSENT
            self.states[f"{export} {name}"] = state
            if not isinstance(error, BusyError):
                text = f"{name}: not exported as {export}: {_reason(error)}. It will be retried."
                self._say_once(f"{export} {name}", text)
        for name in due.keys() - failed:
            path = marks / f"{name}.json"
            store.replace(path, store.dump(_read_mark(path) | {str(export): due[name]}))

    def _export_models(self, export: Export, names: Mapping[str, str]) -> dict[str, Exception]:
        models = []
        cards = {}
        with contextlib.suppress(UserError):  # there are none any more
            models = [m for m in read_models([self.out], lambda text: None) if m.name in names]
        for target in find_targets(self.run_dir):
            with contextlib.suppress(OSError, UnicodeDecodeError):
                cards[target.name] = (target.path / CARD).read_text(encoding="utf-8")
        lost = names.keys() - {model.name for model in models}
        failed: dict[str, Exception] = {
            n: UserError(f"its results are not in {self.out}", code="no-results") for n in lost
        }
        return failed | export.export(models, cards, self.say)

    def _say_once(self, key: str, text: str) -> None:
        if self._lines.get(key) != text:
            self.say(text)
        self._lines[key] = text

    def _requests(self) -> Requests:
        """Return by task the digest of everything but the model that affects its result."""
        settings = asdict(self.settings)
        source = settings.pop("data")
        _ = settings.pop("batch_size")
        requests = {}
        for task in self.tasks:
            facts: list[Any]
            if isinstance(task, ForeignTask):
                facts = [task.name, task.fingerprint()]
            else:
                files = list[FileStat]()  # empty for data of the hub
                with contextlib.suppress(OSError):
                    files = _stat_files(sorted((Path(source) / task.name).glob("*.jsonl*")))
                spec = json.dumps(task.spec.model_dump(mode="json"))  # the order of inputs counts
                facts = [task.name, task.version, spec, files]
            requests[task.name] = store.digest_json([[facts], settings, self.dtype, VERSION])[:16]
        return requests

    def _is_done(self, target: Target, requests: Requests) -> bool:
        """Return whether a mark says that these files were evaluated for these requests, or cannot be."""
        mark = _read_mark(self.directory / "done" / f"{target.name}.json")
        states = _states(mark, requests) if mark.get("files") == target.fingerprint() else {None}
        if None not in states and states != {EVALUATED}:
            self.states[target.name] = FAILED
        return None not in states

    def _write_mark(self, target: Target, files: str, requests: Requests, state: str, **facts: Any) -> None:
        """Write a target's mark. Keep the states of other tasks, unless the files or the dtype changed."""
        path = self.directory / "done" / f"{target.name}.json"
        before = _read_mark(path)
        same = before.get("files") == files and before.get("dtype") == self.dtype
        asked = {name: {"request": request, "state": state} for name, request in requests.items()}
        mark = {
            "name": target.name,
            "state": state if state in (EVALUATED, "gone") else "failed",
            "files": files,
            "dtype": self.dtype,
            "asked": (before["asked"] if same else {}) | asked,
        }
        store.replace(path, store.dump(mark | facts))

    def _attempt(self, target: Target, requests: Requests) -> bool:
        """Evaluate a target whose lease is held, and return whether it was evaluated. Record failures."""
        files = target.fingerprint()
        unchanged = 0.0
        failure = ""
        trace = None
        try:
            with _pinned(target.path, self.directory / PINS / target.name) as pinned:
                now = file_system_now(self.directory)
                unchanged = now - max((path.stat().st_mtime for path in pinned.glob("*")), default=now)
                target.require_complete(pinned, unchanged >= SETTLE_SECONDS)
                return self._evaluate(target, pinned, files, requests)
        except IncompleteError as error:
            if not target.path.is_dir():
                self._write_mark(target, files, requests, "gone")
                self.say(f"{target.name}: removed before it could be evaluated")
            elif unchanged < STALE_SECONDS:
                self.states[target.name] = WAITING
                self._say_once(target.name, f"{target.name}: not ready: {error}")
            else:
                failure = f"{error}, and nothing has changed for {unchanged / 60:.0f} minutes"
        except Exception as error:
            failure = _reason(error)
            trace = traceback.format_exc()
            # A full disk, a lost mount or a busy device: a retry may succeed.
            transient = isinstance(error, OSError | FailureError) or type(error).__name__ in TRANSIENT
            if transient or "CUDA error" in str(error):
                self.states[target.name] = TROUBLED
                self.say(f"{target.name}: {failure}. It will be retried.")
                return False
            self._require_inputs()
        if failure:
            self.states[target.name] = FAILED
            self._write_mark(target, files, requests, failure, reason=failure, traceback=trace)
            self.say(
                f"{target.name} failed: {failure}. It will be retried when its files or the settings change."
            )
        return False

    def _evaluate(self, target: Target, pinned: Path, files: str, requests: Requests) -> bool:
        """Evaluate a target, and return whether training has its scores, if it waits for them."""
        model = EvaluatedModel(str(pinned), target.name, self.dtype)
        model.source = str(target.path)
        digest = "" if target.checkpoint is None else checkpoint_digest(target.checkpoint)
        results = run_all(model, self.tasks, self.settings, self.out, self.say)
        checkpoint = target.checkpoint
        if checkpoint and digest and not self._report_scores(step_of(checkpoint), digest, results, requests):
            return False
        mean, text = mean_accuracy(results)
        self._write_mark(target, files, requests, EVALUATED, step=model.facts.get("step"), accuracy=mean)
        self.evaluated.append(target.name)
        self.say(f"{target.name}: {text}")
        return True

    def _report_scores(
        self, step: int, digest: str, results: Sequence[TaskResult], requests: Requests
    ) -> bool:
        """Append the accuracies of a checkpoint to the run's task_scores.jsonl, for training to read.

        Return whether the checkpoint is done. Otherwise the watcher tries again, with the stored results.
        """
        scores = [
            (task.name, result["accuracy"], requests[task.name])
            for task, result in zip(self.tasks, results, strict=True)
            if "accuracy" in result
        ]
        try:
            append_scores(self.run_dir, step, digest, scores)
        except OSError as error:
            self._say_once("scores", f"training cannot use the scores: {one_line(error)}")
            return error.errno in (errno.EROFS, errno.EACCES, errno.EPERM)  # somebody else's run
        return True

    def _require_inputs(self) -> None:
        """Raise UserError if data or retriever are at fault, so that no checkpoint is marked for them."""
        for task in self.tasks:
            if isinstance(task, ForeignTask):
                task.load()
                continue
            load_data(task, self.settings.data, self.settings.limit, self.settings.shots)
        if self.settings.sentence_model is not None:
            encoder_path(self.settings.sentence_model)


def _read_mark(path: Path) -> dict[str, Any]:
    """Return the mark in a file, or {} if it is absent or torn."""
    return store.read_json_or_none(path) or {}


def _states(mark: Mapping[str, Any], requests: Requests) -> set[str | None]:
    """Return the states of requests in a mark, with None if a request is missing."""
    asked = {name: mark.get("asked", {}).get(name) for name in requests}
    return {
        entry.get("state") if isinstance(entry, dict) and entry.get("request") == requests[name] else None
        for name, entry in asked.items()
    }


def _reason(error: Exception) -> str:
    """Return an error in one line, with its type unless it is meant for users."""
    line = one_line(error)
    return line if isinstance(error, UserError) else f"{type(error).__name__}: {line}"


@contextlib.contextmanager
def _pinned(path: Path, pin: Path) -> Iterator[Path]:
    """Yield a directory of hard links to the files of `path`, or `path` if they cannot be linked."""
    shutil.rmtree(pin, ignore_errors=True)
    try:
        with contextlib.suppress(OSError):
            shutil.copytree(path, pin, copy_function=os.link)
            path = pin
        yield path
    finally:
        shutil.rmtree(pin, ignore_errors=True)
