"""Places: on which file systems runs have kept their checkpoints, remembered in the state directory.

Homes are mostly shared by the nodes of a cluster. So a run that goes on from another node learns that its directory was
on a file system which is not mounted there, and does not take the empty mount point for a new store.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec

from keepstep.checkpoint import mounts
from keepstep.checkpoint.files import write_atomic
from keepstep.checkpoint.mounts import Mount
from keepstep.checkpoint.tiers.directory import MARKER

PLACES = "places.json"
"""In the state directory."""
MAX_PLACES = 1000
"""Those that have not been used for longest are forgotten first."""


def lost(path: Path, state: Path) -> str:
    """Why an empty directory is not the one that an earlier run has used; empty where nothing speaks for that.

    A directory that bears a tier's marker is one, wherever it lies. Where the file system is the same as before,
    somebody has emptied the directory, and may do so.
    """
    before, there = _read(state).get(str(path)), mounts.covering(path)
    if before is None or there is None or os.path.exists(path / MARKER) or not mounts.lies_above(there, before):
        return ""
    return (
        f"an earlier run found {before.source} ({before.kind}) at {before.point}, and nothing is mounted there now "
        f"(known from {state / PLACES})"
    )


def remember(path: Path, state: Path) -> None:
    """Note where a directory lies now. Best effort: a state directory that cannot be written is told of elsewhere."""
    there, known = mounts.covering(path), _read(state)
    if there is None or known.get(str(path)) == there:
        return
    known.pop(str(path), None)
    kept = dict(list(known.items())[1 - MAX_PLACES :]) | {str(path): there}
    with contextlib.suppress(OSError):
        state.mkdir(parents=True, exist_ok=True)
        write_atomic(state / PLACES, msgspec.json.format(msgspec.json.encode(kept)) + b"\n")


def _read(state: Path) -> dict[str, Mount]:
    try:
        return msgspec.json.decode((state / PLACES).read_bytes(), type=dict[str, Mount])
    except (OSError, msgspec.DecodeError):
        return {}
