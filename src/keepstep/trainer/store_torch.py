"""Dials the rendezvous store of an epoch."""

from __future__ import annotations

from datetime import timedelta
from typing import Final

from torch._C._distributed_c10d import TCPStore

from keepstep.trainer.resolver import brief_resolver

CONNECT_S: Final = 5.0
"""A store answers before its epoch is announced: one that does not within this time is dead, and waiting is in vain."""


def dial(host: str, port: int, *, limit_s: float) -> TCPStore:
    """A client of the store at ``host``; its later requests may take ``limit_s`` each.

    Raises:
        RuntimeError: nothing answers there.
    """
    connect = timedelta(seconds=max(1.0, min(limit_s, CONNECT_S)))
    with brief_resolver():
        client = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=connect)
    client.set_timeout(timedelta(seconds=max(1.0, limit_s)))
    return client
