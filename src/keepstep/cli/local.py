"""What this machine's own memory adds to a controller's answer: the ranks' process ids, and the step they are at now.

A controller hears of a step only where it matters for a recovery, and of no process id at all. Both lie in the memory
of the node, so they are there for whoever asks on that node, and missing for the ranks of other machines.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from keepstep.agent import proc
from keepstep.cli.demo_watch import read_beat
from keepstep.cli.source import Source, node_configs


def add_local(source: Source, job: dict[str, Any]) -> dict[str, Any]:
    """The job with ``pid`` for each rank (``None`` on other machines), and steps as they are at this moment."""
    places = {} if source.run_dir is None else {c["node"]: Path(c["node_dir"]) for c in node_configs(source.run_dir)}
    slots = {node: _slots(place) for node, place in places.items()}
    seen = 0
    for row in job["ranks"]:
        row["pid"] = _pid(slots.get(row["node"], {}).get(row["slot"], {}))
        place = places.get(row["node"])
        beat = None if place is None else read_beat(place, row["slot"])
        if beat is not None:
            row["step"] = max(row["step"], beat.step)
            seen += 1
    if seen and seen == job["world_size"]:
        job["step"] = min(row["step"] for row in job["ranks"])
    return job


def _slots(node_dir: Path) -> Mapping[str, Mapping[str, Any]]:
    """The agent's own list of its processes; empty once the node's memory is gone."""
    try:
        found: dict[str, dict[str, Any]] = json.loads((node_dir / "slots.json").read_bytes())["slots"]
    except (OSError, ValueError, KeyError):
        return {}
    return found


def _pid(slot: Mapping[str, Any]) -> int | None:
    """Only while it is the same process: people will kill what they read here."""
    try:
        pid, start = int(slot["pid"]), int(slot["start"])
    except (KeyError, ValueError, TypeError):
        return None
    return pid if proc.is_alive(pid, start) else None
