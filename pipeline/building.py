"""Operations that DeepSpeed compiles when they are first used, and what a killed start leaves of that."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch.distributed as dist
from torch.utils import cpp_extension

log = logging.getLogger(__name__)


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Around what may compile: DeepSpeed builds an operation where and when it is first used.

    torch guards a build by a file named `lock` that a killed process leaves behind, and every later start
    would wait for it in silence. Starts share a lock of the system's, which dies with its process: whoever
    gets it alone takes away such files, except those that some other program here has open.
    """
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root())
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # nothing can be built there either
            root.mkdir(parents=True, exist_ok=True)
        if int(os.environ.get("LOCAL_RANK", 0)) == 0 and os.access(root, os.W_OK):
            share = stack.enter_context((root / "starting").open("w"))
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(share, fcntl.LOCK_EX | fcntl.LOCK_NB)
                for left in (lock for lock in root.rglob("lock") if not _has_open(lock)):
                    log.info("%s was left by a start that was killed; removed", left)
                    left.unlink()
            fcntl.flock(share, fcntl.LOCK_SH)
        if dist.is_initialized():
            dist.barrier()
        yield


def _has_open(path: Path) -> bool:
    """Whether a process of this machine has the file open."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if str(path) in {file.path for file in process.open_files()}:
                return True
    return False
