"""What an incident's records say of checkpoints: where states came from, and which copies were no good."""

from __future__ import annotations

from collections.abc import Sequence

from keepstep.model.facts import CheckpointNoted
from keepstep.model.records import AnyRecord, Observed
from keepstep.model.topology import fold_ranks

TROUBLES_SHOWN = 3
"""Copies in trouble that the block names; the timeline has them all."""
_PLACES = {"memory": "memory", "peer": "another node's memory", "local": "own disks", "remote": "the shared place"}


def copies_lines(own: Sequence[AnyRecord]) -> list[str]:
    """``state:`` and ``copies:`` lines of an incident's block; none where the log has no such notes."""
    notes = [r.fact for r in own if isinstance(r, Observed) and isinstance(r.fact, CheckpointNoted)]
    lines = _restored([note for note in notes if note.what == "restored"])
    bad = [note for note in notes if note.what in ("damaged", "gap", "skipped")]
    seen: dict[tuple[str, str, int, str], list[int]] = {}
    for note in bad:
        ranks = seen.setdefault((note.what, note.tier, note.step, note.why), [])
        if note.rank is not None:
            ranks.append(note.rank)
    for (what, tier, step, why), ranks in list(seen.items())[:TROUBLES_SHOWN]:
        who = f"rank {fold_ranks(sorted(ranks))}: " if ranks else ""
        said = "no copy on another node" if what == "gap" else f"{what} ({tier} tier)"
        lines.append(f"copies: {who}step {step} {said}" + (f": {why}" if why else ""))
    if len(seen) > TROUBLES_SHOWN:
        lines.append(f"        and {len(seen) - TROUBLES_SHOWN} more")
    return lines


def _restored(notes: Sequence[CheckpointNoted]) -> list[str]:
    """Ranks that were given a state, by the step and the tier that it came from."""
    came: dict[tuple[int, str], list[int]] = {}
    for note in notes:
        if note.rank is not None:
            came.setdefault((note.step, note.tier), []).append(note.rank)
    return [
        f"state:  rank {fold_ranks(sorted(ranks))} from step {step} in {_PLACES[tier]}"
        for (step, tier), ranks in sorted(came.items())
    ]
