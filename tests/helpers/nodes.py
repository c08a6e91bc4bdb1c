"""Simulate cluster hosts on one machine: python -m tests.helpers.nodes torchrun HOST,HOST,... LOGS WORDS

Each HOST is an existing network namespace. This process imports the libraries, and forks a torchrun with the
arguments WORDS for each host. Torchrun forks its ranks too (--run-path, --start-method), so that all share
memory and import nothing again. A host's output goes to LOGS/HOST.log, and its exit code to stdout. Ranks of
$SLOW_HOST delay every step and everything that preflight measures by $SLOW_SECONDS.
"""

from __future__ import annotations

import ctypes
import gc
import os
import runpy
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

from torch.distributed import run as elastic
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

from emo.launch import rank as program
from emo.pipeline.batches.loader import Loader
from tests.helpers.slow_host import measure_slowly

LIBC = ctypes.CDLL(None, use_errno=True)
CLONE_NEWUTS, CLONE_NEWNET = 0x04000000, 0x40000000


def enter(host: str) -> None:
    """Move this process to the network of a host, and set its hostname."""
    with Path("/run/netns", host).open("rb") as network:
        if LIBC.setns(network.fileno(), CLONE_NEWNET) or LIBC.unshare(CLONE_NEWUTS):
            raise OSError(ctypes.get_errno(), f"cannot enter {host}")
    socket.sethostname(host)


def be_late(seconds: float) -> None:
    """Delay every step and preflight measurement of this host's ranks."""
    read = Loader.step

    def late(*args: Any, **options: Any) -> Any:
        time.sleep(seconds)
        return read(*args, **options)

    Loader.step = late  # type: ignore[method-assign]
    measure_slowly(seconds)


def rank(script: str, *arguments: str) -> None:
    """Run a rank. A successful rank returns, as torchrun expects."""
    leave = program.leave

    def left(code: int) -> NoReturn:
        if code:
            leave(code)
        sys.exit(code)

    program.leave, sys.argv = left, [script, *arguments]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise


def torchrun(host: str, log: Path, words: list[str]) -> None:
    """Run the torchrun of a host."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    enter(host)
    if host == os.environ.get("SLOW_HOST"):
        be_late(float(os.environ["SLOW_SECONDS"]))
    elastic.main(["--run-path", "--start-method=fork", *words])


def main(names: str, logs: str, *words: str) -> None:
    """Start all hosts and wait for them."""
    elastic.run_script_path = rank
    # The original inspects all modules at every message between nodes. A real torchrun imports few of them.
    dynamic_rendezvous.get_method_name = lambda depth=2: ""
    gc.freeze()
    hosts = {}
    for host in names.split(","):
        if pid := os.fork():
            hosts[pid] = host
            continue
        try:
            torchrun(host, Path(logs, f"{host}.log"), [*words])
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    while hosts:
        pid, status = os.wait()
        print(hosts.pop(pid), os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main(*sys.argv[2:])
