"""Collectives: from what each rank has launched in each of its groups, who is it that all others wait for?

An operation of a group ends when all members have launched it. Whoever is inside of one therefore waits for the
members that have not launched it, and those may wait in an operation of another group for yet another rank. Following
these waits leads to a rank that waits for nobody: the one that does not come. Where they lead back in a circle, the
ranks have launched their operations in different orders: the code. Where they lead nowhere, everybody has come, and
what holds them is the network or the library. Where members have launched different operations under the same number,
the few are at odds with the many. The idea of comparing sequences per group: torch's flight recorder,
https://pytorch.org/tutorials/unstable/flight_recorder_tutorial.html. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Literal

from msgspec import Struct

from keepstep.model.ids import Rank
from keepstep.model.position import Collective, GroupPosition, RankPosition
from keepstep.model.topology import fold_ranks

Kind = Literal["missing", "mismatch", "order", "messages", "inside", "outside"]
"""What the positions show: somebody does not come, operations differ, they were launched in different orders, messages
wait for each other, all are inside of the same operation, or too many are outside for anyone to be odd."""

MISSING, MISMATCH = 0.95, 0.95
"""That the rank at which all waits end is the one to look at; that the few are wrong, and not the many."""
MANY_MISSING = 0.7
"""The same where several do not come: one of them may wait for another in a way that is not seen here."""
SAME_INPUT = frozenset({"all_reduce", "broadcast", "reduce", "all_gather_into_tensor", "reduce_scatter_tensor"})
"""Operations that take as many elements on every member. Others may differ without fault, so only their names count."""
SHOWN = 6
"""Lines of evidence."""

Key = tuple[str, tuple[Rank, ...]]


class Finding(Struct, frozen=True, kw_only=True):
    """Attributes:
    ranks: the guilty; empty when none can be told from the others.
    suspects: ranks one of which it is, where ``ranks`` is empty.
    reason: what is said of them, without a subject: "has not launched ...".
    """

    kind: Kind
    ranks: tuple[Rank, ...]
    probability: float
    reason: str
    evidence: tuple[str, ...]
    suspects: tuple[Rank, ...] = ()


def find(
    positions: Iterable[RankPosition], *, elsewhere: Collection[Rank] = (), halted: Collection[Rank] = ()
) -> Finding | None:
    """What the positions of a job that does not move show; ``None`` where there is nothing to go by.

    Args:
        elsewhere: ranks that were seen to be in no collective, whatever they still have in the air.
        halted: ranks of which no thread runs: what they have launched does not go on, either.
    """
    board = _Board(positions, elsewhere=set(elsewhere) | set(halted), halted=set(halted))
    if not board.at:
        return None
    if found := _mismatch(board):
        return found
    if not any(board.waits(rank) for rank in board.at):
        return _nobody(board, "outside", "no rank is in a collective: none of them waits for another")
    ends = _ends(board)
    sinks = sorted(rank for end in ends if len(end) == 1 for rank in end)
    if sinks:
        return _missing(board, sinks)
    if circles := [sorted(end) for end in ends if len(end) > 1]:
        return _circle(board, circles)
    return _nobody(board, "inside", _all_inside(board))


# -------------------------------------------------------------------- the board


class _Board:
    """Positions by group, and who waits for whom."""

    def __init__(self, positions: Iterable[RankPosition], *, elsewhere: set[Rank], halted: set[Rank]) -> None:
        self.at = {position.rank: position for position in positions if position.groups}
        self.halted = halted
        self.elsewhere = elsewhere
        self.groups: dict[Key, dict[Rank, GroupPosition]] = {}
        for rank, position in sorted(self.at.items()):
            for group in position.groups:
                self.groups.setdefault((group.group, group.ranks), {})[rank] = group

    def waiting(self, rank: Rank) -> list[tuple[Key, Collective]]:
        """Collectives in which the rank is inside: the oldest of each group."""
        if rank in self.elsewhere or rank not in self.at:
            return []
        inside = [((g.group, g.ranks), g.inside) for g in self.at[rank].groups]
        return [(key, one) for key, one in inside if one is not None]

    def messages(self, rank: Rank) -> list[tuple[Key, Collective]]:
        """Messages that the rank waits for, unless it has gone on to a collective since."""
        if rank in self.elsewhere or rank not in self.at:
            return []
        newest = min((one.age_s for _, one in self.waiting(rank)), default=float("inf"))
        return [
            ((group.group, group.ranks), one)
            for group in self.at[rank].groups
            for one in group.messages
            if one.age_s <= newest
        ]

    def waits(self, rank: Rank) -> bool:
        return bool(self.waiting(rank) or self.messages(rank))

    def missing(self, key: Key, sequence: int) -> list[Rank]:
        """Members that have not launched it, that do not tell, or that have launched it and been halted since."""
        members = self.groups[key]
        return [rank for rank in key[1] if self._lacks(rank, members.get(rank), sequence)]

    def _lacks(self, rank: Rank, at: GroupPosition | None, sequence: int) -> bool:
        if at is None or at.launched < sequence:
            return True
        return rank in self.halted and at.finished < sequence

    def next_of(self, rank: Rank) -> set[Rank]:
        """Ranks that this one waits for."""
        found = {other for key, one in self.waiting(rank) for other in self.missing(key, one.sequence)}
        for key, one in self.messages(rank):
            if one.peer is not None and not self._answers(one.peer, key, rank, one.op):
                found.add(one.peer)
        return found - {rank}

    def _answers(self, peer: Rank, key: Key, rank: Rank, op: str) -> bool:
        """Whether the other end has begun its part of this rank's message."""
        wanted = "recv" if op == "send" else "send"
        at = self.groups[key].get(peer)
        return at is not None and any(
            (one.op == wanted and one.peer == rank) or (one.op == "recv_anysource" and wanted == "recv")
            for one in at.messages
        )


def _ends(board: _Board) -> list[set[Rank]]:
    """Where waits end: sets of ranks that can be reached from somebody who waits, and that wait for nobody else."""
    starts = [rank for rank in board.at if board.waits(rank)]
    graph: dict[Rank, set[Rank]] = {}
    todo = list(starts)
    while todo:
        rank = todo.pop()
        if rank not in graph:
            graph[rank] = board.next_of(rank)
            todo += graph[rank]
    waited_for = {other for others in graph.values() for other in others}
    parts = [part for part in _components(graph) if all(graph[rank] <= part for rank in part)]
    return [part for part in parts if len(part) > 1 or part & waited_for]


def _components(graph: dict[Rank, set[Rank]]) -> Iterator[set[Rank]]:
    """Strongly connected components (Kosaraju's two passes, without recursion)."""
    order: list[Rank] = []
    seen: set[Rank] = set()
    for root in graph:
        stack = [(root, iter(graph[root]))] if root not in seen else []
        seen.add(root)
        while stack:
            rank, others = stack[-1]
            if (after := next((o for o in others if o not in seen), None)) is None:
                order.append(rank)
                stack.pop()
            else:
                seen.add(after)
                stack.append((after, iter(graph[after])))
    back: dict[Rank, set[Rank]] = {rank: set() for rank in graph}
    for rank, waited in graph.items():
        for other in waited:
            back[other].add(rank)
    seen.clear()
    for root in reversed(order):
        if root in seen:
            continue
        part, todo = {root}, [root]
        seen.add(root)
        while todo:
            fresh = back[todo.pop()] - seen
            seen |= fresh
            part |= fresh
            todo += fresh
        yield part


# -------------------------------------------------------------------- verdicts


def _mismatch(board: _Board) -> Finding | None:
    """Operations under one number of one group, and not the same ones, while some member is still inside."""
    for key, members in board.groups.items():
        held = {one.sequence for rank in members for other, one in board.waiting(rank) if other == key}
        for sequence in sorted(held):
            launched = {rank: one for rank, at in members.items() if (one := _numbered(at, sequence)) is not None}
            if found := _at_odds(board, key, launched):
                return found
    return None


def _numbered(at: GroupPosition, sequence: int) -> Collective | None:
    return next((one for one in at.recent or filter(None, [at.last]) if one.sequence == sequence), None)


def _at_odds(board: _Board, key: Key, launched: dict[Rank, Collective]) -> Finding | None:
    kinds = {rank: _kind(one) for rank, one in launched.items()}
    counts = Counter(kinds.values()).most_common()
    if len(counts) < 2:
        return None
    usual, many = counts[0]
    odd = sorted(rank for rank, kind in kinds.items() if kind != usual)
    ordinary = next(one for rank, one in launched.items() if kinds[rank] == usual)
    told = [f"rank {fold_ranks(ranks)}: {tell(one)}" for ranks, one in _alike(launched)]
    if many * 2 > len(kinds):
        strange = launched[odd[0]]
        theirs = tell(ordinary, number=False)
        reason = f"launched {tell(strange)} where {many} other ranks of group {key[0]} launched {theirs}"
        return Finding(
            kind="mismatch", ranks=tuple(odd), probability=MISMATCH, reason=reason, evidence=tuple(told[:SHOWN])
        )
    reason = f"the members of group {key[0]} launched different operations under number {ordinary.sequence}"
    suspects = tuple(sorted(launched))
    return _nobody(board, "mismatch", reason, suspects=suspects, evidence=told)


def _alike(launched: dict[Rank, Collective]) -> list[tuple[list[Rank], Collective]]:
    found: dict[tuple[str, int, str], list[Rank]] = {}
    for rank, one in sorted(launched.items()):
        found.setdefault(one.signature, []).append(rank)
    rows = [(ranks, launched[ranks[0]]) for ranks in found.values()]
    return sorted(rows, key=lambda row: len(row[0]))


def _kind(one: Collective) -> tuple[str, int, str]:
    return one.signature if one.op in SAME_INPUT else (one.op, 0, "")


def _missing(board: _Board, sinks: Sequence[Rank]) -> Finding:
    """Ranks at which all waits end. The many are not what the few wait for: then it is not about single ranks."""
    world = len({rank for key in board.groups for rank in key[1]})
    if len(sinks) * 2 > world or (len(sinks) * 2 == world and world > 2):
        return _nobody(board, "outside", f"{len(sinks)} of {world} ranks are in no collective: none of them is odd")
    silent = [rank for rank in sinks if rank not in board.at]
    key, one, waiters = _waited_in(board, sinks)
    reason = f"{_lacking(board, sinks[0], key, one)}, in which {_count(waiters)}"
    if silent == list(sinks):
        reason = f"does not tell where it stands, and {_count(waiters)} in {tell(one)} of group {key[0]}"
    sure = len(sinks) == 1 and not silent and not board.waits(sinks[0])
    chance = MISSING if sure else MANY_MISSING
    return Finding(
        kind="missing", ranks=tuple(sinks), probability=chance, reason=reason, evidence=_lines(board, first=sinks)
    )


def _lacking(board: _Board, rank: Rank, key: Key, one: Collective) -> str:
    """What the rank has not done."""
    at = board.groups[key].get(rank)
    if one.peer is not None:
        return f"has not begun its part of {tell(one)} of group {key[0]}"
    if at is not None and at.launched >= one.sequence:
        return f"has been stopped inside of {tell(one)} of group {key[0]}"
    if held := board.waiting(rank):
        other, still = held[0]
        return (
            f"is still inside of {tell(still)} of group {other[0]}, and has not launched {tell(one)} of group {key[0]}"
        )
    return f"has not launched {tell(one)} of group {key[0]}"


def _waited_in(board: _Board, sinks: Sequence[Rank]) -> tuple[Key, Collective, list[Rank]]:
    """The operation in which most ranks wait for one of ``sinks``, directly."""
    found: dict[tuple[Key, int], list[tuple[Rank, Collective]]] = {}
    for rank in board.at:
        for key, one in [*board.waiting(rank), *board.messages(rank)]:
            wanted = {one.peer} if one.peer is not None else set(board.missing(key, one.sequence))
            if wanted & set(sinks):
                found.setdefault((key, one.sequence), []).append((rank, one))
    (key, _), waiters = max(found.items(), key=lambda item: len(item[1]))
    return key, waiters[0][1], [rank for rank, _ in waiters]


def _circle(board: _Board, circles: Sequence[Sequence[Rank]]) -> Finding:
    """Ranks that wait for each other: none of them alone can be told to have gone astray."""
    ranks = tuple(sorted(rank for circle in circles for rank in circle))
    only = all(board.messages(rank) and not board.waiting(rank) for rank in ranks)
    what = "messages" if only else "collectives"
    reason = f"ranks {fold_ranks(ranks)} wait for each other in {what}: they launched them in different orders"
    return _nobody(board, "messages" if only else "order", reason, suspects=ranks, evidence=_lines(board, first=ranks))


def _nobody(
    board: _Board, kind: Kind, reason: str, *, suspects: tuple[Rank, ...] = (), evidence: Sequence[str] = ()
) -> Finding:
    return Finding(
        kind=kind,
        ranks=(),
        probability=0.0,
        reason=reason,
        evidence=tuple(evidence or _lines(board))[:SHOWN],
        suspects=suspects,
    )


def _all_inside(board: _Board) -> str:
    inside = {rank: held[0] for rank in board.at if (held := board.waiting(rank))}
    ops = {(key, one.sequence) for key, one in inside.values()}
    if len(ops) == 1 and inside:
        (name, _), one = next(iter(inside.values()))
        return f"all members of group {name} have launched {tell(one)} and wait inside of it: none of them is to blame"
    return "everybody has launched what the others wait in: the network or the library holds them, no rank is to blame"


# -------------------------------------------------------------------- words


def tell(one: Collective, *, number: bool = True) -> str:
    """``all_reduce #41 (4,096 float32)``."""
    name = f"{one.op or 'an operation'} #{one.sequence}" if number else (one.op or "another")
    size = f" ({one.elements:,} {one.dtype})" if one.dtype else ""
    to = f" {'to' if one.op == 'send' else 'from'} rank {one.peer}" if one.peer is not None else ""
    return f"{name}{to}{size}"


def line(position: RankPosition) -> str:
    """Where one rank stands, group by group; idle groups are left out if it is inside of another."""
    inside = [f"in {tell(g.inside)} of group {g.group}" for g in position.groups if g.inside]
    inside += [f"in {tell(one)} of group {g.group}" for g in position.groups for one in g.messages]
    done = [f"{g.launched} done in group {g.group}" for g in position.groups if g.launched]
    return ", ".join(inside or done or ["nothing launched"])


def _lines(board: _Board, first: Sequence[Rank] = ()) -> tuple[str, ...]:
    """Evidence: the ranks that matter one by one, the others together where they stand alike."""
    found: dict[str, list[Rank]] = {}
    for rank in first:
        told = line(board.at[rank]) if rank in board.at else "does not tell"
        seen = f"{told}, seen in no collective" if rank in board.elsewhere and rank in board.at else told
        found.setdefault(seen, []).append(rank)
    lines = [f"rank {fold_ranks(ranks)}: {told}" for told, ranks in found.items()]
    others: dict[str, list[Rank]] = {}
    for rank in sorted(set(board.at) - set(first)):
        others.setdefault(line(board.at[rank]), []).append(rank)
    rows = sorted(others.items(), key=lambda item: -len(item[1]))
    return tuple([*lines, *(f"rank {fold_ranks(ranks)}: {told}" for told, ranks in rows)][:SHOWN])


def _count(ranks: Sequence[Rank]) -> str:
    return f"rank {ranks[0]} waits" if len(ranks) == 1 else f"{len(ranks)} ranks wait"
