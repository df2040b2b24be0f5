"""Copies: in a few lines, how new each copy of a job's state is, what is behind and why, and what to do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from keepstep.cli.render import fold_nodes

TROUBLES_SHOWN = 3
"""Troubles in full; ``-o json`` has all of them."""
PLACES = {"memory": "memory", "peer": "another node", "local": "own disks", "remote": "shared"}
Age = Callable[[str | None], str]


def copies_line(job: Mapping[str, Any], age: Age) -> str:
    """``newest step in: memory 1200, another node 1200, own disks 1200 (14 s ago), shared 1100 (3 min ago)``.

    Args:
        job: a row of the controller's answer; empty where it knows nothing of copies, as an older one.
        age: of a time, in words.
    """
    saved = {row["tier"]: row["saved_at"] for row in job.get("checkpoints") or ()}
    cells = []
    for tier, step in (job.get("copies") or {}).items():
        if step is not None:
            ago = f" ({age(saved[tier])} ago)" if tier in saved else ""
            cells.append(f"{PLACES[tier]} {step}{ago}")
    return f"newest step in: {', '.join(cells)}" if cells else ""


def trouble_lines(job: Mapping[str, Any], age: Age) -> list[str]:
    """What is behind: one line each with the reason, one with the way out."""
    rows = job.get("checkpoint_troubles") or ()
    lines = []
    for row in rows[:TROUBLES_SHOWN]:
        lines += [f"behind: {_words(row, age)}", f"  help: {row['help']}"]
    if len(rows) > TROUBLES_SHOWN:
        lines.append(f"behind: {len(rows) - TROUBLES_SHOWN} more; -o json has them all")
    return lines


def _words(row: Mapping[str, Any], age: Age) -> str:
    place, long = PLACES[row["tier"]], age(row["since"])
    where = f" on {fold_nodes(row['nodes'])}" if row["nodes"] else ""
    if row["what"] == "gap":
        return (
            f"rank {row['ranks']} has no copy on another node since step {row['first_step']}, for {long}: {row['why']}"
        )
    many = row["generations"] > 1
    steps = f"steps {row['first_step']} to {row['step']} ({row['generations']})" if many else f"step {row['step']}"
    what = "left out" if row["what"] == "skipped" else "damaged"
    who = "" if row["ranks"] == "-" else f", rank {row['ranks']}"
    return f"{place}{where}: {steps} {what}{who} for {long}: {row['why']}"
