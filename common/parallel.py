"""A map over worker processes that keeps order, bounds memory and leaves no orphan behind.

Each worker has a pipe of its own, of which nobody else holds the other end: when it dies, even in the middle
of a result, the pipe ends and that is seen. With a queue that all share, as `concurrent.futures` has it, the
rest of that result would be waited for while any other worker lives.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from .errors import UserError

JOIN = 10.0  # seconds for a worker to end by itself


@contextlib.contextmanager
def set_environment(changes: Mapping[str, str]) -> Iterator[None]:
    """Set variables of this process's environment for a block; those alone are put back."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})


class WorkerPool:
    """`count` processes, each with the function that `make(*arguments)` gives there; with one, this process.

    Use as a context manager. Results do not depend on the count.
    """

    def __init__(self, count: int, make: Callable[..., Callable[[Any], Any]], *arguments: Any) -> None:
        self.count, self._make = count, (make, arguments)
        self._function = make(*arguments) if count <= 1 else None
        self._started: list[tuple[Connection, multiprocessing.process.BaseProcess]] = []
        if self._function is not None:
            return
        # Not fork: the tokenizer library starts threads, and a forked thread pool hangs.
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([make.__module__])
        # The server of workers is started by `python -c`, which would look in the working directory first:
        # there may lie a common.py or data_prep.py of the user's.
        path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
        with set_environment({"PYTHONPATH": path, "PYTHONSAFEPATH": "1"}):
            multiprocessing.forkserver.ensure_running()
        self._threads = ThreadPoolExecutor(count)  # each thread talks to one worker, which it starts
        self._local = threading.local()

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *error: object) -> None:
        if self._function is not None:
            return
        self._threads.shutdown(wait=True, cancel_futures=True)
        for connection, _ in self._started:
            connection.close()  # a worker ends when its pipe does
        for _, process in self._started:
            process.join(JOIN)
            if process.is_alive():
                process.kill()

    def map(self, items: Iterable[Any]) -> Iterator[Any]:
        """Yield the function of each item, in order; items are taken only as results are consumed."""
        if self._function is not None:
            yield from map(self._function, items)
            return
        running: deque[Future[Any]] = deque()
        for item in items:
            running.append(self._threads.submit(self._apply, item))
            if len(running) > 3 * self.count:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()

    def _apply(self, item: Any) -> Any:
        """Return the function of an item, computed by this thread's worker."""
        local = self._local
        if not hasattr(local, "connection"):
            local.connection, child_end = self._context.Pipe()
            local.process = self._context.Process(target=_work, args=(child_end, *self._make), daemon=True)
            self._started.append((local.connection, local.process))
            local.process.start()
            child_end.close()
        try:
            local.connection.send(item)
            result, error = local.connection.recv()
        except (EOFError, OSError):  # the end of a pipe, between messages and in the middle of one
            local.process.join(JOIN)
            code = local.process.exitcode
            raise UserError(
                f"a worker process died (exit code {code}), most likely for lack of memory; run again with "
                "fewer --workers"
            ) from None
        if error is not None:
            raise error
        return result


def _work(
    connection: Connection, make: Callable[..., Callable[[Any], Any]], arguments: tuple[Any, ...]
) -> None:
    """In a worker: answer items with the function's results, or its errors, until the pipe ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent has it too, and ends its workers
    parent = multiprocessing.parent_process()

    def follow() -> None:
        """End when the parent is killed, in the middle of an item too."""
        if parent is not None:
            parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
    function = make(*arguments)
    with contextlib.suppress(EOFError, OSError):
        while True:
            item = connection.recv()
            answer: tuple[Any, Exception | None]
            try:
                answer = function(item), None
            except Exception as error:
                error.add_note(traceback.format_exc())
                answer = None, error
            connection.send(answer)
