"""Builds gloo backends: one device for all groups of a generation, and a note of each group's connections."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import ProcessGroupGloo, Store

from keepstep.trainer.sockets import Handle, connected, has_timeout, open_sockets

_MARK_MS: Final = 70
"""Added to connect timeouts, so that gloo's sockets differ from sockets with a timeout that a person would choose."""


class GlooInside:
    """A gloo backend with all operations of a ProcessGroup, also those that Backend has no Python names for."""

    def __init__(self, store: Store, rank: int, size: int, device: Any, limit_s: float) -> None:
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [device]
        options._timeout = timedelta(milliseconds=mark(limit_s))
        self.gloo = ProcessGroupGloo(store, rank, size, options)
        self._raw: Any = dist.ProcessGroup(store, rank, size)
        self._raw._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, self.gloo)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.gloo, name)

    def allgather_into_tensor_coalesced(self, *args: Any) -> Any:
        return self._raw.all_gather_single_coalesced(*args)

    def reduce_scatter_tensor_coalesced(self, *args: Any) -> Any:
        return self._raw.reduce_scatter_single_coalesced(*args)


def mark(limit_s: float) -> int:
    """The timeout in milliseconds that gloo's sockets carry for a connect limit."""
    return int(limit_s) * 1000 + _MARK_MS


def gloo_device() -> Any:
    """A listening socket and an event loop that several groups share."""
    try:
        return ProcessGroupGloo.create_default_device(lazy_init=False)
    except TypeError:  # torch before 2.7 has no lazy connections
        return ProcessGroupGloo.create_default_device()


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
