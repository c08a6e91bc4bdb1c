"""A map over worker processes that keeps order, bounds memory and leaves no orphan behind."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from common.errors import UserError

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


class Workers:
    """`count` processes that have each called `setup(*arguments)`; with one, this process itself.

    Use as a context manager. Results do not depend on the count.
    """

    def __init__(self, count: int, setup: Callable[..., None], *arguments: Any) -> None:
        self.count = count
        self._pool: ProcessPoolExecutor | None = None
        if count <= 1:
            setup(*arguments)
            return
        # Not fork: the tokenizer library starts threads, and a forked thread pool hangs.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["data_prep.encode"])
        self._pool = ProcessPoolExecutor(count, context, _begin, (setup, arguments))

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *error: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def map(self, function: Callable[[ItemT], ResultT], items: Iterable[ItemT]) -> Iterator[ResultT]:
        """function(item) for each item, in order; items are taken only as results are consumed."""
        if self._pool is None:
            yield from map(function, items)
            return
        running: deque[Future[ResultT]] = deque()
        try:
            for item in items:
                running.append(self._pool.submit(function, item))
                if len(running) > 3 * self.count:
                    yield running.popleft().result()
            while running:
                yield running.popleft().result()
        except BrokenProcessPool:
            raise UserError(
                "a worker process died, most likely for lack of memory; run again with fewer --workers"
            ) from None


def _begin(setup: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    """First thing in a worker: end with the parent, even when that is killed, and set up."""
    parent = multiprocessing.parent_process()

    def follow() -> None:
        if parent is not None:
            parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
    setup(*arguments)
