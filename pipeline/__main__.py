"""python -m pipeline plan | preflight | score | report."""

from __future__ import annotations

from typing import NoReturn

from pipeline.cli import leave, main


def run() -> NoReturn:
    """Run the command as a process of its own."""
    leave(main())


if __name__ == "__main__":
    run()
