"""Keeps a slow name server out of a recovery.

Torch's store looks up the *name* of the address it connects to, for its log, even where it was given digits. A name
server that loses one query then costs five seconds. The C library's patience is a property of the thread, so it can
be shortened for one connection without touching what the user's threads do.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Final

WAIT_S: Final = 1
"""How long a name server may take to answer."""
TRIES: Final = 1


class _Patience(ctypes.Structure):
    """The head of glibc's ``struct __res_state`` (resolv.h)."""

    _fields_ = (("retrans", ctypes.c_int), ("retry", ctypes.c_int))


@contextlib.contextmanager
def brief_resolver() -> Iterator[None]:
    """Within this block, name look-ups of this thread give up after ``WAIT_S``; elsewhere nothing changes."""
    patience = _patience()
    if patience is None:  # not glibc
        yield
        return
    before = patience.retrans, patience.retry
    patience.retrans, patience.retry = WAIT_S, TRIES
    try:
        yield
    finally:
        patience.retrans, patience.retry = before


def _patience() -> _Patience | None:
    try:
        libc = ctypes.CDLL(None)
        init, state = libc.__res_init, libc.__res_state
    except (OSError, AttributeError):
        return None
    init.restype, state.restype = ctypes.c_int, ctypes.POINTER(_Patience)
    init.argtypes = state.argtypes = []
    if init() != 0:
        return None
    patience: _Patience = state().contents
    return patience
