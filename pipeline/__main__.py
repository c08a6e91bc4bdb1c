"""python -m pipeline plan | preflight | score | report."""

from __future__ import annotations

from pipeline.cli import leave, main

if __name__ == "__main__":
    leave(main())
