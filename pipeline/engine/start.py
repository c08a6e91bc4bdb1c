"""Join the process group of the launcher."""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
from typing import Any

import deepspeed
import psutil
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from emo.common.errors import FailureError, UserError

from ..control.stop import CHOSEN_PORT
from ..control.world import LONG_TIMEOUT, World
from .device.devices import bind_to_near_cores, check_gpus, local_ranks, on_gpu, threads_per_rank


def address_of_host() -> str:
    """Return the address that the name of this host stands for, or that it has none."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "does not resolve"


def is_reachable(address: str) -> bool:
    """Return whether other hosts may reach an address of this host."""
    return address[0].isdigit() and not address.startswith("127.")


def choose_gloo_interface() -> None:
    """Set GLOO_SOCKET_IFNAME if the name of this host stands for loopback, to which gloo would bind.

    It becomes the interface of the route to rank 0. A choice of the user stays.
    """
    several_hosts = local_ranks() < int(os.environ.get("WORLD_SIZE", 1))
    if "GLOO_SOCKET_IFNAME" in os.environ or not several_hosts or is_reachable(address_of_host()):
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ.get("MASTER_ADDR", ""), 1))  # sends nothing
        own = probe.getsockname()[0]
        for name, addresses in psutil.net_if_addrs().items():
            if is_reachable(own) and own in (address.address for address in addresses):
                os.environ["GLOO_SOCKET_IFNAME"] = name


def start_world(timeout_minutes: float = LONG_TIMEOUT) -> World:
    """Join the process group of the launcher. Without a launcher, start a group of one rank."""
    check_gpus()
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if shared and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)):
        # The shared store would keep the addresses of dead ranks, and restarted ranks would connect to them.
        raise UserError(
            "torchrun --max-restarts needs TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1. Set it", code="torchrun"
        )
    if "RANK" not in os.environ:  # port 0: any free one
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    choose_gloo_interface()
    accelerator = get_accelerator()
    if accelerator.device_name() != "cpu":
        accelerator.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if on_gpu():
        gpu: Any = torch.cuda.get_device_properties()
        bind_to_near_cores(f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0")
    # On a CPU DeepSpeed would compile a shared-memory all-reduce here, which only inference uses. This takes
    # half a minute at the first start. A start killed meanwhile leaves a lock that hangs all later ones.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    backend = "gloo" if accelerator.device_name() == "cpu" else accelerator.communication_backend_name()
    timeout = datetime.timedelta(minutes=timeout_minutes)
    try:
        deepspeed.init_distributed(dist_backend=backend, timeout=timeout, verbose=False)
    except torch.distributed.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        port = os.environ["MASTER_PORT"]
        kind = FailureError if os.environ.get(CHOSEN_PORT) == port else UserError  # by launch/supervise.py
        cure = "Choose another one with launch/continual.sh --master_port N -- RECIPE"
        raise kind(f"port {port} of this host is in use. {cure}", code="port") from None
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(threads_per_rank())
    device = torch.device(accelerator.current_device_name())
    return World(dist.get_rank(), dist.get_world_size(), device)
