"""Told: what the guard says, and in which words."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from msgspec import Struct

from keepstep.trainer.guard import Trouble

if TYPE_CHECKING:
    from keepstep.trainer.fingerprint_torch import Compared

NAMED_TENSORS = 4


class Told(Struct, frozen=True, kw_only=True):
    """What the guard says. ``what``: a ``Kind``, or what was done: ``rolled_back``, ``skipped``, ``gone``, ``kept``,
    ``alone`` (there is nothing to compare with), ``judged`` (``verdict`` says what it was), ``quarantined``."""

    what: str
    step: int
    why: str
    ranks: tuple[int, ...] = ()
    tensor: str = ""
    since: int | None = None
    """The newest step that is known to be clean; what was saved after it is tainted."""
    verdict: str = ""
    batches: tuple[str, ...] = ()
    others: tuple[int, ...] = ()


def printed(told: Told) -> None:
    """One line at the terminal."""
    who = f", rank {', '.join(map(str, told.ranks[:8]))}" if told.ranks else ""
    where = f", {told.tensor}" if told.tensor and told.tensor not in told.why else ""
    what = told.what.replace("_", " ") + (f" {told.verdict}" if told.verdict else "")
    print(f"keepstep: guard: step {told.step}{who}{where}: {what}: {told.why}", file=sys.stderr, flush=True)


def describe(found: Compared, step: int) -> Trouble:
    """A comparison that failed behind a step, in words."""
    said = found.vote
    if said.odd:
        first = found.odd[0]
        bits = ", ".join(f"element {bit.element} bit {bit.bit}" for bit in first.bits)
        count = f" ({first.changed} bits: {bits}{', ...' if first.changed > len(first.bits) else ''})" if bits else ""
        names = ", ".join(first.tensors[:NAMED_TENSORS])
        more = f" and {len(first.tensors) - NAMED_TENSORS} more" if len(first.tensors) > NAMED_TENSORS else ""
        others = f"; so do ranks {', '.join(map(str, said.odd[1:]))}" if said.odd[1:] else ""
        why = f"rank {first.rank} differs from the majority of its replicas in {names}{more}{count}{others}"
        return Trouble("replicas", step, why, said.odd, first.tensors[0])
    names = ", ".join(found.tensors[:NAMED_TENSORS]) or "what they hold"
    ranks = ", ".join(map(str, said.tied[:8])) + (" ..." if len(said.tied) > 8 else "")
    why = f"ranks {ranks} differ in {names} and there is no majority: one of them is wrong, which one nobody can tell"
    return Trouble("replicas", step, why, (), found.tensors[0] if found.tensors else "")


def way_out(trouble: Trouble) -> str:
    if trouble.kind == "replicas" and trouble.ranks:
        return f"Take the machine of rank {trouble.ranks[0]} out, then start again from a durable checkpoint"
    if trouble.kind == "replicas":
        return "Are parameters equal on all ranks? If they need not be, say so: ks.register(replicated=False, ...)"
    return "Look at the batch and at the code of that step; keepstep.Guard(...) says what is done about it"
