"""One line at the terminal for each recovery: what happened to whom, and the command that tells more. Pure."""

from __future__ import annotations

from typing import assert_never

from keepstep.model.ids import show_epoch
from keepstep.model.topology import Roster, fold_ranks


def announce(roster: Roster) -> str | None:
    """What the person at the terminal should know about a new roster; ``None`` for a first start."""
    newcomers = tuple(member.rank for member in roster.members if member.newcomer)
    epoch = show_epoch(roster.epoch)
    match roster.mode:
        case "fresh":
            return None
        case "restart":
            what = f"all {roster.world_size} ranks start again, restart {roster.attempt}"
        case "in_process" if newcomers:
            seats = ", ".join(sorted({member.node for member in roster.members if member.newcomer}))
            kept = roster.world_size - len(newcomers)
            what = f"rank {fold_ranks(newcomers)} is replaced on {seats}, {kept} other ranks keep their processes"
        case "in_process":
            what = "all ranks keep their processes and connect anew"
        case _:
            assert_never(roster.mode)
    if roster.incident is not None:
        return f"{what} (epoch {epoch}); next: keepstep incident {roster.incident}"
    return f"{what} (epoch {epoch}, decided by {roster.origin} while no controller answered)"
