"""torchrun's rendezvous with spare nodes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
from torch.distributed.elastic import rendezvous
from torch.distributed.elastic.rendezvous import registry

from tests.helpers.killing import wait_for
from tests.helpers.launching import free_port

MAX_NODES = 2


class Agent:
    """A node's torchrun. It joins a round, and leaves it for a new one if a node is waiting."""

    def __init__(self, port: int, name: str) -> None:
        options = {"min_nodes": MAX_NODES, "max_nodes": MAX_NODES, "local_addr": name}
        options["is_host"] = str(name == "a").lower()
        parameters = rendezvous.RendezvousParameters("emo", f"localhost:{port}", "test", **options)
        self.handler = registry.get_rendezvous_handler(parameters)
        self.rounds, self.joined = 0, False
        self.failed, self.ended = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while not self.ended.is_set():
            self.joined = False
            try:
                self.handler.next_rendezvous()
            except (rendezvous.RendezvousClosedError, rendezvous.RendezvousGracefulExitError):
                return
            self.rounds, self.joined = self.rounds + 1, True
            while not self.failed.wait(0.1) and not self.ended.is_set():
                if self.handler.num_nodes_waiting() > 0:
                    break
            self.failed.clear()


@pytest.fixture
def agents(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Agent]]:
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    port = free_port()
    agents = [Agent(port, name) for name in "abc"]
    yield agents
    for agent in agents:
        agent.ended.set()
    agents[0].handler.set_closed()
    for agent in agents:
        agent.thread.join(10)


def count_joins(agents: list[Agent], expected: int) -> int:
    """Return how often agents joined, after `expected` joins and the time of another round."""
    wait_for(lambda: sum(agent.rounds for agent in agents) >= expected, f"{expected} joins", 60)
    time.sleep(2)
    return sum(agent.rounds for agent in agents)


@pytest.mark.slow
def test_a_spare_node_waits_and_the_others_keep_running(agents: list[Agent]) -> None:
    assert count_joins(agents, MAX_NODES) == MAX_NODES
    next(agent for agent in agents if agent.joined).failed.set()
    assert count_joins(agents, 2 * MAX_NODES) == 2 * MAX_NODES
    assert all(agent.thread.is_alive() for agent in agents)
