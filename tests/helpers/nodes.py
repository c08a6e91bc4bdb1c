"""Hosts of a cluster on one machine: python -m tests.helpers.nodes torchrun HOST,HOST,... LOGS WORDS

Each HOST is a network namespace that is there already. Its torchrun, with these WORDS, is forked from this
process, in which the libraries are imported, and by torchrun's own --run-path and --start-method so are the
ranks: they share most of their memory, and nobody imports again. What a host prints goes to LOGS/HOST.log,
and the exit code of each torchrun to stdout. Ranks of SLOW_HOST (environment) are late by SLOW_SECONDS to
every step, and in all that preflight measures.
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
    """Move this process to the network of a host, and give it the host's name."""
    with Path("/run/netns", host).open("rb") as network:
        if LIBC.setns(network.fileno(), CLONE_NEWNET) or LIBC.unshare(CLONE_NEWUTS):
            raise OSError(ctypes.get_errno(), f"cannot enter {host}")
    socket.sethostname(host)


def be_late(seconds: float) -> None:
    """Have the ranks of this host turn to each step so much later."""
    read = Loader.step

    def late(*args: Any, **options: Any) -> Any:
        time.sleep(seconds)
        return read(*args, **options)

    Loader.step = late  # type: ignore[method-assign]
    measure_slowly(seconds)


def rank(script: str, *arguments: str) -> None:
    """Be a rank; one that has finished returns, which torchrun waits for."""
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
    """Be the torchrun of a host."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    enter(host)
    if host == os.environ.get("SLOW_HOST"):
        be_late(float(os.environ["SLOW_SECONDS"]))
    elastic.main(["--run-path", "--start-method=fork", *words])


def main(names: str, logs: str, *words: str) -> None:
    """Start the hosts, and wait for all."""
    elastic.run_script_path = rank
    # It goes through all modules, of which a real torchrun has few, at every word that nodes exchange.
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
