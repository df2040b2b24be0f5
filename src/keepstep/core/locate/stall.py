"""The stall vote: nobody moves; who is it that the others wait for?

Each rank says how many collectives it has launched and completed. A synchronous program launches the same ones
everywhere, so the rank that is *outside* of any collective while the others are inside one keeps them waiting, and
so does the one that has launched fewer. Where all are inside the same one, the network or the library holds them and
no rank is to blame. Groups that are not the whole world make counts differ between ranks without any fault, so a
lower count alone must be rare (a minority) to convict.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from msgspec import Struct
from msgspec.structs import replace

from keepstep.core.locate.stacks import Consensus
from keepstep.model.facts import RankStalled
from keepstep.model.ids import NodeId, Rank
from keepstep.model.records import Category
from keepstep.model.topology import fold_ranks

AGREES = 0.2
"""What is left of the doubt in a vote when the stacks point at the same ranks."""
ODD_ALONE = 0.75
"""That a minority whose stacks differ is what the others wait for, where positions say nothing."""


class Verdict(Struct, frozen=True, kw_only=True):
    """Attributes:
    ranks: the guilty; empty when the evidence convicts nobody.
    reason: what is said of them, without a subject; or a sentence where it is ``whole`` or names nobody.
    category: whose fault it is; a node is only ever blamed for ``infrastructure``.
    nodes: that the fault is in, where they were told apart by something other than their ranks.
    kill: whether ending the ranks' processes is an answer.
    pair: two nodes that do not reach each other.
    """

    ranks: tuple[Rank, ...]
    probability: float
    reason: str
    evidence: tuple[str, ...]
    category: Category = "unknown"
    nodes: tuple[NodeId, ...] = ()
    kill: bool = True
    whole: bool = False
    pair: tuple[NodeId, ...] = ()

    @property
    def sentence(self) -> str:
        if self.whole or not self.ranks:
            return self.reason
        return f"rank {fold_ranks(self.ranks)} {self.reason}"


def vote(positions: Sequence[RankStalled], gone: Collection[Rank] = ()) -> Verdict:
    """Name the ranks that the others wait for.

    Args:
        positions: where each stalled rank stands.
        gone: ranks whose process has left with code 0 before its loop was complete.
    """
    assert positions, "a vote needs at least one stalled rank"
    evidence = tuple(_line(position) for position in sorted(positions, key=lambda p: p.rank)[:8])
    if gone:
        ranks = tuple(sorted(gone))
        return Verdict(ranks=ranks, probability=0.9, reason="left before the loop was complete", evidence=evidence)
    world = len(positions)
    most = max(position.started for position in positions)
    outside = [p for p in positions if p.started == p.finished]
    behind = [p for p in positions if p.started < most]
    both = [p for p in outside if p.started < most]
    if both and len(both) * 2 <= world:
        fewest = min(p.started for p in both)
        guilty = [p for p in both if p.started == fewest]
        reason = f"is in no collective after the {fewest}th, while the others wait in {_th(most)}"
        return _convict(guilty, 0.95, reason, evidence)
    if outside and len(outside) * 2 <= world and len(outside) < world:
        return _convict(outside, 0.8, f"is in no collective while the others wait in {_th(most)}", evidence)
    if behind and not outside and len(behind) * 2 < world:
        fewest = min(p.started for p in behind)
        guilty = [p for p in behind if p.started == fewest]
        return _convict(guilty, 0.7, f"is still in {_th(fewest)} while the others wait in {_th(most)}", evidence)
    if not outside and not behind:
        reason = f"all {world} ranks wait inside the same one, {_th(most)}: none of them is to blame"
    else:
        reason = "the ranks' positions do not point at a minority of them"
    return Verdict(ranks=(), probability=0.0, reason=reason, evidence=evidence)


def weigh(verdict: Verdict, seen: Consensus | None) -> Verdict:
    """The vote on positions together with where the processes were seen to stand.

    Stacks that agree with the vote make it surer, stacks of a minority name whom the vote could not, and where all
    wait for storage nobody is named: taking a node away would help as little as restarting a process.
    """
    if seen is None:
        return verdict
    evidence = (*verdict.evidence, *(place.line for place in seen.places[:4]))
    if seen.storage:
        reason = "all ranks wait for a file system or a device: none of them is to blame"
        return Verdict(ranks=(), probability=0.0, reason=reason, evidence=evidence)
    if verdict.ranks:
        surer = set(verdict.ranks) <= set(seen.odd)
        doubt = (1 - verdict.probability) * (AGREES if surer else 1.0)
        return replace(verdict, probability=round(1 - doubt, 3), evidence=evidence)
    if seen.odd:
        place = next(place for place in seen.places if place.ranks[0] in seen.odd)
        reason = f"is not where the others are: it {place.doing}, at {place.shown or 'a place that nobody could see'}"
        return Verdict(ranks=seen.odd, probability=ODD_ALONE, reason=reason, evidence=evidence)
    return replace(verdict, evidence=evidence)


def _convict(guilty: Sequence[RankStalled], probability: float, reason: str, evidence: tuple[str, ...]) -> Verdict:
    ranks = tuple(sorted(position.rank for position in guilty))
    return Verdict(ranks=ranks, probability=probability, reason=reason, evidence=evidence)


def _th(number: int) -> str:
    return f"collective {number}"


def _line(p: RankStalled) -> str:
    where = f"inside collective {p.started}" if p.started > p.finished else f"outside, {p.finished} done"
    return f"rank {p.rank} idle {p.idle_s:.1f} s (limit {p.limit_s:.1f} s) at step {p.step}, {where}, busy {p.busy:.2f}"
