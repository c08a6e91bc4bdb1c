"""What the ranks tell each other: that one has failed, and how."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from emo.common.errors import FailureError, UserError
from emo.pipeline import ranks
from emo.pipeline.ranks import World, agreed, lost_a_peer, on_main

PREFIX = (
    "[3] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value store by "
)


@pytest.mark.parametrize(
    ("text", "lost"),
    [
        ("Connection closed by peer [10.0.0.3]:4711", True),
        ("Connection reset by peer", True),
        ("[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Timed out waiting 600000ms for recv", True),
        ("Gloo connectFullMesh failed with [pair.cc:144] no error, Connection refused", True),
        (f"{PREFIX}store->get('0'), but store->get('0') got error: failed to recv, got 0 bytes", True),
        (f"{PREFIX}store->get('0') got error: wait timeout after 600000ms, keys: /default_pg//0//0", True),
        ("This may indicate a possible application crash on rank 0 or a network set up issue.", True),
        ("NCCL error: ncclRemoteError: A call failed possibly due to a network error", True),
        ("socketPollConnect: connect returned No route to host", True),
        ("[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)", True),
        ("ncclInvalidUsage: Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 7000", False),
        ("ncclSystemError: Error while creating shared memory segment: No space left on device", False),
        ("CUDA error: an illegal memory access was encountered", False),
        ("mat1 and mat2 shapes cannot be multiplied", False),
    ],
)
def test_errors_of_a_collective_that_mean_another_rank(
    text: str, lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    assert lost_a_peer(RuntimeError(text)) == lost
    assert not lost_a_peer(ValueError(text))
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    assert not lost_a_peer(RuntimeError(text))


@pytest.mark.parametrize("kind", [UserError, FailureError])
def test_an_error_keeps_its_kind_on_all_ranks(kind: type[UserError], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether trying again may help is decided by it."""

    def fail() -> None:
        raise kind("the disk is full", code="full")

    others: list[object] = [("elsewhere", None)]
    monkeypatch.setattr(ranks, "gather_objects", lambda value: [value, *others])
    with pytest.raises(UserError, match=r"^on \S+: the disk is full$") as caught:
        agreed(fail)
    assert type(caught.value) is kind and caught.value.code == "full"
    with pytest.raises(UserError, match=r"^the disk is full$") as caught:
        on_main(World(0, 2, torch.device("cpu")), fail)
    assert type(caught.value) is kind and caught.value.code == "full"
