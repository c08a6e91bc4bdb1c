"""Slow GPUs, hosts and links are found in given speeds."""

from __future__ import annotations

import pytest

from emo.pipeline.planning.health import Speed, find_faults, neighbour_rounds


@pytest.mark.parametrize(
    ("values", "expected", "faulty"),
    [
        ([610, 640, 655, 620], 680, []),
        ([610, 640, 655, 470], 680, [3]),  # below the expected speed, and less than a third below the others
        ([470, 460, 465, 470], 680, [0, 1, 2, 3]),  # all below the expected speed
        ([0.21, 0.20, 0.10, 0.19], None, [2]),  # below the median
        ([0.21, 0.20, 0.15, 0.19], None, []),
        ([5.0], None, []),
    ],
)
def test_slow_devices_are_found(values: list[float], expected: float | None, faulty: list[int]) -> None:
    speeds = [
        Speed(f"host-{i}", "", "products", value, "TFLOP/s", expected) for i, value in enumerate(values)
    ]
    assert [i for i, fault in enumerate(find_faults(speeds, "cuda")) if fault] == faulty


@pytest.mark.parametrize("hosts", range(1, 34))
def test_every_host_is_measured_with_both_neighbours(hosts: int) -> None:
    rounds = neighbour_rounds(hosts)
    assert sorted(pair for pairs in rounds for pair in pairs) == [
        (i, (i + 1) % hosts) for i in range(hosts)
    ] * (hosts > 2)
    assert all(len({host for pair in pairs for host in pair}) == 2 * len(pairs) for pairs in rounds)
