"""The meeting of torchrun's nodes where some are spare: `torchrun --rdzv-backend emo`.

It is torch's own (c10d), which keeps nodes beyond the maximum of --nnodes aside until there is room, but
for one case that it misses (torch 2.13). A node that comes while others are leaving a broken round waits
for the next one. When that fills up without it, it goes on waiting, the others take it for a new node and
start their ranks again, and in the new round it happens again, to it or to another: for minutes no rank
comes to train.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous import dynamic_rendezvous as elastic
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend

BACKEND = "emo"  # also in pyproject.toml


class SpareExecutor(elastic._DistributedRendezvousOpExecutor):
    """Torch's operations, of which none lets a node wait for room in a full round."""

    def run(
        self,
        state_handler: Callable[[Any, float], Any],
        deadline: float,
        update_deadline: Callable[[Any], float] | None = None,
    ) -> None:
        """Execute an operation; a node that waits for a round which is full becomes a spare."""

        def handler(context: Any, deadline: float) -> Any:
            state = context.state
            if context.node in state.wait_list and not _room(state, context.settings):
                state.wait_list.remove(context.node)
                return elastic._Action.ADD_TO_REDUNDANCY_LIST
            return state_handler(context, deadline)

        super().run(handler, deadline, update_deadline)


class SpareHandler(elastic.DynamicRendezvousHandler):
    """Torch's rendezvous, in which only nodes that there is room for are waiting."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._op_executor = SpareExecutor(self._this_node, self._state_holder, self._settings)

    def num_nodes_waiting(self) -> int:
        """Return the number of nodes that a new round would take; above zero, agents restart their ranks."""
        return min(super().num_nodes_waiting(), _room(self._state_holder.state, self._settings))


def create_handler(parameters: RendezvousParameters) -> RendezvousHandler:
    """Return the rendezvous of one agent."""
    backend, store = create_backend(parameters)
    handler = elastic.create_handler(store, backend, parameters)
    return SpareHandler(handler._this_node, handler.settings, BACKEND, store, handler._state_holder)


def plugin() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Return what makes a rendezvous; torchrun asks every plugin (pyproject.toml) for it when it starts."""
    return create_handler


def _room(state: elastic._RendezvousState, settings: elastic.RendezvousSettings) -> int:
    """Return how many more nodes a complete round could have."""
    return max(0, settings.max_nodes - len(state.participants)) if state.complete else settings.max_nodes
