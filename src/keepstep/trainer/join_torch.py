"""Join: which rank this process is, on which device, and its first process groups.

Under an agent the roster says so; under torchrun its environment does; alone the world has one member. The same
script runs in all three.
"""

from __future__ import annotations

import atexit
import contextlib
import os
from datetime import timedelta

import torch
from msgspec import Struct
from torch import distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from keepstep.model.topology import Member, Roster
from keepstep.trainer.groups_torch import GROUPS, Groups

STORE_CONNECT_S = 60.0


class Identity(Struct, frozen=True, kw_only=True):
    """Who this process is."""

    rank: int
    local_rank: int
    world_size: int
    device: str


def join_roster(roster: Roster, seat: Member, *, stand_in: bool, timeout: timedelta | None) -> tuple[Identity, Groups]:
    """Take the seat: environment, device, groups (real ones, or stand-ins until the loop begins)."""
    os.environ.update(environment(roster, seat))
    device = pick_device(seat.local_rank)
    store = None
    if not stand_in:
        limit = timeout or timedelta(seconds=STORE_CONNECT_S)
        store = TCPStore(roster.store_host, roster.store_port, is_master=False, wait_for_workers=False, timeout=limit)
    GROUPS.start(
        rank=seat.rank,
        world_size=roster.world_size,
        store=store,
        key=roster.key,
        stand_in=stand_in,
        device="cuda" if device.type == "cuda" else "cpu",
        timeout=timeout,
    )
    who = Identity(rank=seat.rank, local_rank=seat.local_rank, world_size=roster.world_size, device=str(device))
    return who, GROUPS


def join_plain(timeout: timedelta | None) -> Identity:
    """Without an agent: torchrun's environment where it is set, else alone."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = pick_device(local_rank)
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        if "RANK" in os.environ:
            store = _agent_store()
            if store is None:
                dist.init_process_group(backend, timeout=timeout)
            else:
                rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
                dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
        else:
            dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)
        if device.type == "cpu":
            atexit.register(_leave)
    return Identity(rank=dist.get_rank(), local_rank=local_rank, world_size=dist.get_world_size(), device=str(device))


def _leave() -> None:
    """End the groups that we made while the interpreter still stands.

    gloo's threads live as long as its groups; one that wants the interpreter's lock after its end takes the process
    down with ``terminate called without an active exception``, though the script has done all it had to do.
    """
    with contextlib.suppress(Exception):
        if dist.is_initialized():
            dist.destroy_process_group()


def _agent_store() -> Store | None:
    """Where torchrun keeps one store for all of its restarts: that store, with keys of this restart alone.

    torch itself (2.13) uses the same keys again, finds the addresses of ranks that are gone, and fails once more.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    start = f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{os.environ['WORLD_SIZE']}"
    limit = timedelta(seconds=STORE_CONNECT_S)
    return PrefixStore(f"keepstep/{start}", TCPStore(host, port, is_master=False, timeout=limit))


def environment(roster: Roster, seat: Member) -> dict[str, str]:
    """What torchrun would have set for this seat; a parked process learns it only now."""
    nodes = roster.node_order
    neighbours = roster.seats_on(seat.node)
    return {
        "RANK": str(seat.rank),
        "LOCAL_RANK": str(seat.local_rank),
        "WORLD_SIZE": str(roster.world_size),
        "LOCAL_WORLD_SIZE": str(len(neighbours)),
        "GROUP_RANK": str(nodes.index(seat.node)),
        "GROUP_WORLD_SIZE": str(len(nodes)),
        "ROLE_RANK": str(seat.rank),
        "ROLE_WORLD_SIZE": str(roster.world_size),
        "MASTER_ADDR": roster.store_host,
        "MASTER_PORT": str(roster.store_port),
        "TORCHELASTIC_RESTART_COUNT": str(roster.attempt),
    }


def device_named(name: str) -> torch.device:
    """The device that an ``Identity`` names."""
    return torch.device(name)


def pick_device(local_rank: int) -> torch.device:
    """The accelerator of this local rank, made current; CPU where there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device
