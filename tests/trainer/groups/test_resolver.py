"""Name look-ups are brief where a recovery depends on them, and nowhere else."""

from __future__ import annotations

import ctypes
import threading

import pytest

from keepstep.trainer import resolver
from keepstep.trainer.resolver import TRIES, WAIT_S, brief_resolver


def patience() -> tuple[int, int] | None:
    """This thread's (seconds, tries) as the C library has them now."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "__res_state"):
        return None
    state = libc.__res_state
    state.restype = ctypes.POINTER(resolver._Patience)
    return state().contents.retrans, state().contents.retry


def test_only_this_thread_and_only_within_the_block() -> None:
    """The block shortens the patience of its own thread and gives it back; another thread sees nothing of it."""
    if patience() is None:
        pytest.skip("needs glibc")
    with brief_resolver():
        pass  # the first use reads the configuration
    before = patience()
    elsewhere: list[tuple[int, int] | None] = []
    with brief_resolver():
        assert patience() == (WAIT_S, TRIES)
        other = threading.Thread(target=lambda: elsewhere.append(_initialised()))
        other.start()
        other.join()
    assert patience() == before != (WAIT_S, TRIES)
    assert elsewhere == [before]


def _initialised() -> tuple[int, int] | None:
    resolver._patience()
    return patience()
