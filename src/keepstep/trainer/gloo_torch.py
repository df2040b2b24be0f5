"""Builds gloo backends: one device for all groups of a generation, and a note of each group's connections."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any, Final

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import ProcessGroupGloo, Store

from keepstep.trainer.sockets import Handle, connected, has_timeout, listening_address, open_sockets

_MARK_MS: Final = 70
"""Added to connect timeouts, so that gloo's sockets differ from sockets with a timeout that a person would choose."""

_DIRECT: Final = (
    "allgather",
    "allgather_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "recv",
    "recv_anysource",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
    "_allgather_base",
    "_reduce_scatter_base",
)

_address: str | None = None


class GlooInside:
    """A gloo backend with all operations of a ProcessGroup, also those that Backend has no Python names for."""

    def __init__(self, store: Store, rank: int, size: int, device: Any, limit_s: float) -> None:
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [device]
        options._timeout = timedelta(milliseconds=mark(limit_s))
        self.gloo = ProcessGroupGloo(store, rank, size, options)
        raw: Any = dist.ProcessGroup(store, rank, size)
        raw._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, self.gloo)
        for name in _DIRECT:
            setattr(self, name, getattr(self.gloo, name))
        self.allgather_into_tensor_coalesced = _either(
            raw, "all_gather_single_coalesced", "allgather_into_tensor_coalesced"
        )
        self.reduce_scatter_tensor_coalesced = _either(
            raw, "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"
        )


def _either(owner: Any, new: str, old: str) -> Any:
    """An operation by its name since torch 2.12, else by the one before."""
    return getattr(owner, new, None) or getattr(owner, old)


def mark(limit_s: float) -> int:
    """The timeout in milliseconds that gloo's sockets carry for a connect limit."""
    return int(limit_s) * 1000 + _MARK_MS


def gloo_device() -> Any:
    """A listening socket and an event loop that several groups share.

    The first one of a process finds out by which address the others reach it, which may ask a name server; later
    ones use that address, so that no recovery waits for a name server. ``GLOO_SOCKET_IFNAME`` names the interface to
    listen at, as with torch's own groups; of several the first is taken.

    Raises:
        RuntimeError: there is no such interface.
    """
    global _address
    if _address is not None:
        return _device(ProcessGroupGloo.create_device, hostname=_address)
    before = open_sockets()
    if interface := os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0].strip():
        device = _device(ProcessGroupGloo.create_device, interface=interface)
    else:
        device = _device(ProcessGroupGloo.create_default_device)
    found = [a for a in map(listening_address, open_sockets() - before) if a is not None]
    if len(found) == 1:
        _address = found[0]
    return device


def _device(make: Any, **options: Any) -> Any:
    try:
        return make(lazy_init=False, **options)
    except TypeError:  # torch before 2.7 has no lazy connections
        return make(**options)


def connect_gloo(
    store: Store, rank: int, size: int, *, device: Any, limit_s: float, timeout: timedelta
) -> tuple[GlooInside, tuple[Handle, ...]]:
    """Connect to all members of a group; blocks until they are there.

    Raises:
        RuntimeError: somebody did not come within ``limit_s``, or the store is gone.
    """
    before = open_sockets()
    inside = GlooInside(store, rank, size, device, limit_s)
    connections = connected(open_sockets() - before, has_timeout(mark(limit_s)))
    inside.gloo._set_default_timeout(timeout)
    return inside, connections
