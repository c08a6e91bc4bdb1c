"""Shared fixtures: real data where it is present, and one thread per process so that ranks do not fight."""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import pytest
import torch

torch.set_num_threads(1)

REPO = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The directory of real data beside the checkout (or $SHARED_DATA); skips where it is absent."""
    path = Path(os.environ.get("SHARED_DATA", REPO.parent / "shared" / "data"))
    if not path.is_dir():
        pytest.skip(f"real data not found at {path}; set SHARED_DATA to its directory")
    return path
