"""The flight recorder that torch keeps of NCCL's operations: switched on before the first group, dumped when asked."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec
from torch._C import _distributed_c10d as c10d

from keepstep.model.position import GroupPosition
from keepstep.trainer.recorder import read_dump

ENTRIES = "2000"
"""Operations that torch keeps, where the user has not said otherwise."""

Dump = Callable[[], bytes]


def switch_on() -> None:
    """Have torch record, by the name of the setting in this version."""
    old, new = "TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_FR_BUFFER_SIZE"
    if old not in os.environ:
        os.environ.setdefault(new if hasattr(c10d, "_dump_fr_trace_json") else old, ENTRIES)


def find_dump() -> Dump | None:
    """The recorder of NCCL's operations, else the one of every other backend's; ``None`` where torch has none."""
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        if (dump := getattr(c10d, name, None)) is not None:
            return lambda: bytes(dump(True, False))
    return None


def recorded(members: Mapping[str, Sequence[int]], dump: Dump | None = None) -> tuple[GroupPosition, ...]:
    """Where these groups stand by the recorder; nothing where there is none, or none that this version can read."""
    dump = dump or find_dump()
    if dump is None or not members:
        return ()
    try:
        return read_dump(dump(), members, now_ns=time.time_ns())
    except (RuntimeError, TypeError, ValueError, msgspec.MsgspecError):
        return ()
