"""An ordered map over worker processes with bounded memory and no orphans.

Each worker has its own pipe. If a worker dies, even while it sends a result, its pipe closes and the parent
notices. With the shared queue of `concurrent.futures`, the parent would wait for the rest of that result as
long as any other worker lives.
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

JOIN = 10.0  # seconds that a worker has to exit


@contextlib.contextmanager
def set_environment(changes: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables of this process for a block, and restore them afterwards."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})


class WorkerPool:
    """A pool of worker processes that apply the function `make(*arguments)` to items.

    A pool of one uses this process. Use the pool as a context manager. Results do not depend on the count.
    """

    def __init__(self, count: int, make: Callable[..., Callable[[Any], Any]], *arguments: Any) -> None:
        self.count = count
        self._make = (make, arguments)
        self._function = make(*arguments) if count <= 1 else None
        self._started: list[tuple[Connection, multiprocessing.process.BaseProcess]] = []
        if self._function is not None:
            return
        # No fork: the tokenizer library starts threads, and a forked thread pool hangs.
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([make.__module__])
        # The fork server is started by `python -c`, which would import modules from the working directory
        # first. A user's common.py must not hide ours.
        path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
        with set_environment({"PYTHONPATH": path, "PYTHONSAFEPATH": "1"}):
            multiprocessing.forkserver.ensure_running()
        self._threads = ThreadPoolExecutor(count)  # each thread starts one worker and talks to it
        self._local = threading.local()

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *error: object) -> None:
        if self._function is not None:
            return
        self._threads.shutdown(wait=True, cancel_futures=True)
        for connection, _ in self._started:
            connection.close()  # the worker then exits
        for _, process in self._started:
            process.join(JOIN)
            if process.is_alive():
                process.kill()

    def map(self, items: Iterable[Any]) -> Iterator[Any]:
        """Apply the function to items in order. Items are consumed only as fast as results are used."""
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
        """Apply the function to an item in this thread's worker."""
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
        except (EOFError, OSError):  # the pipe was closed
            local.process.join(JOIN)
            code = local.process.exitcode
            raise UserError(
                f"a worker process died (exit code {code}), probably because memory ran out. Run again with "
                "fewer --workers",
                code="worker-died",
            ) from None
        if error is not None:
            raise error
        return result


def _work(
    connection: Connection, make: Callable[..., Callable[[Any], Any]], arguments: tuple[Any, ...]
) -> None:
    """In a worker: send the result or error of each received item until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent receives it too and stops its workers
    parent = multiprocessing.parent_process()

    def exit_with_parent() -> None:
        if parent is not None:
            parent.join()
        os._exit(1)

    threading.Thread(target=exit_with_parent, daemon=True).start()
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
