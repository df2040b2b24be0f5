"""What a job could fall back on, tier by tier, what is behind and why, and what to do about it."""

from __future__ import annotations

from typing import Any

from keepstep.controlplane.moments import when
from keepstep.core.state import Job, Mishap
from keepstep.model.ids import NodeId, Rank
from keepstep.model.topology import fold_ranks

View = dict[str, Any]
WHY_FIRST = 3
"""Explanations shown of ranks whose copies lag for different reasons."""


def checkpoint_rows(job: Job) -> list[View]:
    """The newest generation of each durable tier. Nodes' own disks count as one: what all of them have.

    A disk whose node is not in the roster any more has nothing to say about the present world.
    """
    rows = []
    own = {name: saved for name, saved in job.saved.items() if name != "remote"}
    here = [saved for name, saved in own.items() if job.in_roster(NodeId(name.partition("/")[2]))]
    shared = job.saved.get("remote")
    for tier, saved in (("local", min(here, key=lambda one: one.step, default=None)), ("remote", shared)):
        if saved is not None:
            rows.append(
                {
                    "tier": tier,
                    "step": saved.step,
                    "saved_at": when(saved.at),
                    "verified": saved.verified,
                    "bytes": saved.bytes,
                    "seconds": saved.seconds,
                }
            )
    return rows


def copies_row(job: Job) -> View:
    """Newest steps that are known of: in each rank's memory, on another node, on nodes' own disks, in the shared place.

    ``None`` where there is nothing of that kind. Memory is as new as the last step that the log knows of.
    """
    every = job.spec.snapshot_every
    memory = job.step if every > 0 and job.settled else None
    if memory is not None and not job.pace:
        memory -= memory % every
    has_buddies = job.roster is not None and any(place.buddy for place in job.roster.places)
    peer = memory if has_buddies else None
    if peer is not None and job.gaps:
        peer = min(peer, *(gap.step for gap in job.gaps.values()))
    durable = {row["tier"]: row["step"] for row in checkpoint_rows(job)}
    return {"memory": memory, "peer": peer, "local": durable.get("local"), "remote": durable.get("remote")}


def trouble_rows(job: Job) -> list[View]:
    """Everything that is behind, oldest first; equal ones of several nodes or ranks in one row."""
    rows = [*_mishap_rows(job), *_gap_rows(job)]
    return sorted(rows, key=lambda row: row["since"] or "")


def _gap_rows(job: Job) -> list[View]:
    """Ranks without a copy on another node; those beyond the first few explanations in one row."""
    by_why: dict[str, list[Rank]] = {}
    for rank, gap in sorted(job.gaps.items(), key=lambda item: (item[1].at, item[0])):
        by_why.setdefault(gap.why, []).append(rank)
    groups = list(by_why.values())
    if len(groups) > WHY_FIRST:
        groups = [*groups[: WHY_FIRST - 1], sorted(rank for group in groups[WHY_FIRST - 1 :] for rank in group)]
    rows = []
    for ranks in groups:
        gaps = [job.gaps[rank] for rank in ranks]
        oldest = min(gaps, key=lambda gap: gap.at)
        rows.append(
            {
                "tier": "peer",
                "what": "gap",
                "ranks": fold_ranks(sorted(ranks)),
                "nodes": sorted({str(job.seat_of(rank).node) for rank in ranks}) if job.roster else [],
                "first_step": min(gap.step for gap in gaps),
                "step": max(gap.step for gap in gaps),
                "generations": 0,
                "since": when(oldest.at),
                "at": when(max(gap.at for gap in gaps)),
                "why": oldest.why,
                "help": "the newest steps of these ranks are lost with their node: look at it, its buddy and the link",
            }
        )
    return rows


def _mishap_rows(job: Job) -> list[View]:
    """Generations that were left out or damaged, per tier: many nodes tell of the same full disk."""
    groups: dict[tuple[str, str], list[tuple[str, Mishap]]] = {}
    for key, mishap in job.mishaps.items():
        what, _, place = key.partition(" ")
        tier, _, node = place.partition("/")
        if not node or job.in_roster(NodeId(node)):
            groups.setdefault((what, tier), []).append((node, mishap))
    rows = []
    for (what, tier), found in groups.items():
        mishaps = [mishap for _, mishap in found]
        newest = max(mishaps, key=lambda one: one.at)
        rows.append(
            {
                "tier": tier,
                "what": what,
                "ranks": "-" if newest.rank is None or len(mishaps) > 1 else str(newest.rank),
                "nodes": sorted(node for node, _ in found if node),
                "first_step": min(one.first_step for one in mishaps),
                "step": max(one.step for one in mishaps),
                "generations": max(one.steps for one in mishaps),
                "since": when(min(one.since for one in mishaps)),
                "at": when(newest.at),
                "why": newest.why,
                "help": _help(job, what, tier),
            }
        )
    return rows


def _help(job: Job, what: str, tier: str) -> str:
    match what, tier:
        case "damaged", ("local" | "remote"):
            return f"see which generations are sound: keepstep ckpt verify --job {job.id}"
        case "damaged", _:
            return "another copy was used; a node that says this twice has bad memory: drain it"
        case _, "memory":
            return "free memory on these nodes, or take fewer snapshots: --snapshot-every"
        case _:
            return f"see what there is to go back to: keepstep ckpt ls --job {job.id}"
