"""A slow host is found on real ranks of which one is slow."""

from __future__ import annotations

from pathlib import Path

from tests.helpers import launching


def test_a_slow_host_of_three_is_named(tmp_path: Path) -> None:
    """Four ranks have the names of three hosts, and rank 1 computes and communicates slowly."""
    recipe = launching.tiny_recipe(tmp_path)
    group = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "COLUMNS": "200"}
    group |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(launching.free_port())}
    ranks = [group | {"RANK": rank, "LOCAL_RANK": rank} for rank in "0123"]
    done = launching.run_forked(ranks, "-m", "tests.helpers.slow_host", str(recipe))
    assert done.returncode == 1, done.stdout
    assert "unfit: host-1" in done.stdout.splitlines(), done.stdout
    assert all(
        text in done.stdout for text in ("matrix products", "memory", "all-gather inside", "neighbour")
    )
