"""Work as tasks of Ray, which places them on a cluster or this machine and repeats them after failures."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from .errors import FailureError, UserError, one_line
from .parallel import set_environment

RETRIES = 20  # of a task whose process or node died, or which met a failure that may pass
STORE_BYTES = 80 << 20  # memory for results of a local cluster, which are small


@contextlib.contextmanager
def connect(cpus: int | None = None) -> Iterator[None]:
    """Use the cluster at RAY_ADDRESS for a block, or one on this machine with `cpus` (all) CPUs."""
    try:
        import ray
    except ImportError:
        raise UserError("--on ray needs a package. Run: pip install ray", code="missing-extra") from None

    address = os.environ.get("RAY_ADDRESS")
    local: dict[str, Any] = {"num_cpus": cpus, "object_store_memory": STORE_BYTES}
    local["include_dashboard"] = False
    options = {"log_to_driver": False, "logging_level": "ERROR"} | ({} if address else local)
    with set_environment({"RAY_USAGE_STATS_ENABLED": "0"}):
        try:
            host, _, port = (address or "").removeprefix("ray://").rpartition(":")
            if port.isdecimal():  # Ray itself tries for minutes
                socket.create_connection((host, int(port)), timeout=10).close()
            ray.init(address or "local", **options)
        except OSError as error:
            problem = f"RAY_ADDRESS={address} cannot be reached ({one_line(error)})"
            raise FailureError(f"{problem}. Correct or unset it", code="unreachable") from None
        except (ValueError, RuntimeError) as error:  # no address, or another version of Ray or Python
            problem = f"RAY_ADDRESS={address} cannot be used ({one_line(error)})"
            raise UserError(f"{problem}. Correct or unset it", code="address") from None
    try:
        yield
    finally:
        ray.shutdown()


def run_tasks(
    function: Callable[..., Any], shared: Any, numbers: Iterable[int], *arguments: Any, gpus: bool = False
) -> Iterator[tuple[int, Any]]:
    """Yield each number with the result of its task, as they end. Raises UserError of a task.

    Args:
        function: What a task calls with `shared`, its number and the arguments.
        shared: The first argument of all tasks.
        numbers: One for each task.
        arguments: Further arguments of all tasks.
        gpus: Give each task a GPU if the cluster has any. A task has one CPU in any case.
    """
    import ray

    again: Any = [FailureError, OSError]
    options: dict[str, Any] = {"num_cpus": 1, "max_retries": RETRIES, "retry_exceptions": again}
    options["num_gpus"] = int(gpus and ray.cluster_resources().get("GPU", 0) > 0)
    task = ray.remote(scheduling_strategy="SPREAD", **options)(function)
    waiting = {task.remote(shared, number, *arguments): number for number in numbers}
    while waiting:
        (done, *_), _ = ray.wait(list(waiting), num_returns=1)
        try:
            result = ray.get(done)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None
        except ray.exceptions.RayError as error:
            raise FailureError(
                f"Ray gave up a task after {RETRIES} retries ({one_line(error)}). Run the command again",
                code="unreachable",
            ) from None
        yield waiting.pop(done), result
