"""Rendezvous of torchrun's nodes when some are spares: `torchrun --rdzv-backend emo`.

This is torch's c10d rendezvous with one fix, for torch 2.13. Torch keeps nodes beyond the maximum of --nnodes
as spares until a running node leaves. But a node that arrives while the others leave a broken round waits
for the next round. If that round fills up without it, it keeps waiting. The others then treat it as a new
node and restart their ranks, and the same can happen in the new round. For minutes no rank trains.

Runs with spare nodes need this fix. It derives from private classes of torch, which has no public hook for
it. tests/campaigns/nodes.py runs it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous import dynamic_rendezvous as elastic
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend

BACKEND = "emo"  # also in pyproject.toml


class SpareExecutor(elastic._DistributedRendezvousOpExecutor):
    """Torch's executor, which makes a node a spare instead of letting it wait for a full round."""

    def run(
        self,
        state_handler: Callable[[Any, float], Any],
        deadline: float,
        update_deadline: Callable[[Any], float] | None = None,
    ) -> None:
        """Execute an operation of torch's rendezvous."""

        def handler(context: Any, deadline: float) -> Any:
            state = context.state
            if context.node in state.wait_list and not _free_slots(state, context.settings):
                state.wait_list.remove(context.node)
                return elastic._Action.ADD_TO_REDUNDANCY_LIST
            return state_handler(context, deadline)

        super().run(handler, deadline, update_deadline)


class SpareHandler(elastic.DynamicRendezvousHandler):
    """Torch's rendezvous, which counts only nodes with a free slot as waiting."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._op_executor = SpareExecutor(self._this_node, self._state_holder, self._settings)

    def num_nodes_waiting(self) -> int:
        """Return the number of nodes that a new round would add. Above 0, agents restart ranks."""
        return min(super().num_nodes_waiting(), _free_slots(self._state_holder.state, self._settings))


def create_handler(parameters: RendezvousParameters) -> RendezvousHandler:
    """Return the rendezvous of one agent."""
    backend, store = create_backend(parameters)
    handler = elastic.create_handler(store, backend, parameters)
    return SpareHandler(handler._this_node, handler.settings, BACKEND, store, handler._state_holder)


def plugin() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Return `create_handler`. torchrun calls this entry point (see pyproject.toml) when it starts.

    Restarted ranks need a store of their own, because a shared one keeps the addresses of dead ranks.
    """
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    return create_handler


def _free_slots(state: elastic._RendezvousState, settings: elastic.RendezvousSettings) -> int:
    """Return how many more nodes a complete round can take."""
    return max(0, settings.max_nodes - len(state.participants)) if state.complete else settings.max_nodes
