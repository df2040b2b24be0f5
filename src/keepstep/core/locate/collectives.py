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
from collections.abc import Collection, Iterable, Sequence
from typing import Literal

from msgspec import Struct

from keepstep.core.locate.circles import components, has_circle, short_circle
from keepstep.model.ids import Rank
from keepstep.model.position import Collective, GroupPosition, RankPosition
from keepstep.model.topology import fold_ranks

Kind = Literal["missing", "mismatch", "order", "messages", "inside", "outside", "silent"]
"""What the positions show: somebody does not come, operations differ, they were launched in different orders, messages
wait for each other, all are inside of the same operation, too many are outside for anyone to be odd, or those that are
waited for do not tell where they stand."""

MISSING, MISMATCH = 0.95, 0.95
"""That the rank at which all waits end is the one to look at; that the few are wrong, and not the many."""
ORDER = 0.9
"""That the only rank through which all circles of waits lead is the one that went astray."""
MANY_MISSING = 0.7
"""The same where several do not come: one of them may wait for another in a way that is not seen here."""
SAME_INPUT = frozenset({"all_reduce", "broadcast", "reduce", "all_gather_into_tensor", "reduce_scatter_tensor"})
"""Operations that take as many elements on every member. Others may differ without fault, so only their names count."""
SHOWN = 6
"""Lines of evidence."""


class _Group:
    """One group of the job, and where its members stand in it. Compared by identity: thousands of members are many."""

    def __init__(self, position: GroupPosition) -> None:
        self.name, self.ranks = position.group, position.ranks
        self.at: dict[Rank, GroupPosition] = {}


Node = Rank | tuple[_Group, int]
"""A rank, or an operation by its group and number."""


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
    graph = board.graph()
    ends = _ends(graph)
    if sinks := _ranks(node for end in ends if len(end) == 1 for node in end):
        return _missing(board, sinks)
    if circle := {node for end in ends for node in end}:
        return _circle(
            board, {node: [o for o in others if o in circle] for node, others in graph.items() if node in circle}
        )
    return _nobody(board, "inside", _all_inside(board))


# -------------------------------------------------------------------- the board


class _Board:
    """Positions by group, and who waits for whom."""

    def __init__(self, positions: Iterable[RankPosition], *, elsewhere: set[Rank], halted: set[Rank]) -> None:
        self.at = {position.rank: position for position in positions if position.groups}
        self.halted = halted
        self.elsewhere = elsewhere
        known: dict[tuple[str, str], _Group] = {}  # two groups of different ranks may have one name
        self.of: dict[Rank, list[_Group]] = {}
        for rank, position in sorted(self.at.items()):
            for one in position.groups:
                if (group := known.get((one.group, one.members))) is None:
                    group = known[one.group, one.members] = _Group(one)
                group.at[rank] = one
                self.of.setdefault(rank, []).append(group)
        self.groups = tuple(known.values())
        self._missing: dict[tuple[_Group, int], list[Rank]] = {}

    def waiting(self, rank: Rank) -> list[tuple[_Group, Collective]]:
        """Collectives in which the rank is inside: the oldest of each group."""
        if rank in self.elsewhere or rank not in self.at:
            return []
        inside = [(group, group.at[rank].inside) for group in self.of[rank]]
        return [(group, one) for group, one in inside if one is not None]

    def messages(self, rank: Rank) -> list[tuple[_Group, Collective]]:
        """Messages that the rank waits for, unless it has gone on to a collective since."""
        if rank in self.elsewhere or rank not in self.at:
            return []
        newest = min((one.age_s for _, one in self.waiting(rank)), default=float("inf"))
        return [(group, one) for group in self.of[rank] for one in group.at[rank].messages if one.age_s <= newest]

    def waits(self, rank: Rank) -> bool:
        return bool(self.waiting(rank) or self.messages(rank))

    def missing(self, key: _Group, sequence: int) -> list[Rank]:
        """Members that have not launched it, that do not tell, or that have launched it and been halted since."""
        if (known := self._missing.get((key, sequence))) is None:
            known = [rank for rank in key.ranks if self._lacks(rank, key.at.get(rank), sequence)]
            self._missing[key, sequence] = known
        return known

    def _lacks(self, rank: Rank, at: GroupPosition | None, sequence: int) -> bool:
        if at is None or at.launched < sequence:
            return True
        return rank in self.halted and at.finished < sequence

    def graph(self) -> dict[Node, list[Node]]:
        """Ranks that wait, the operations they wait in, and the ranks that these lack; linear in their number."""
        found: dict[Node, list[Node]] = {}
        for rank in self.at:
            ops: list[Node] = [(key, one.sequence) for key, one in self.waiting(rank)]
            for key, one in self.waiting(rank):
                found[key, one.sequence] = [*self.missing(key, one.sequence)]
            ops += [
                one.peer
                for key, one in self.messages(rank)
                if one.peer is not None and not self._answers(one.peer, key, rank, one.op)
            ]
            if ops:
                found[rank] = ops
        for node in [node for nodes in found.values() for node in nodes]:
            found.setdefault(node, [])
        return found

    def _answers(self, peer: Rank, key: _Group, rank: Rank, op: str) -> bool:
        """Whether the other end has begun its part of this rank's message."""
        wanted = "recv" if op == "send" else "send"
        at = key.at.get(peer)
        return at is not None and any(
            (one.op == wanted and one.peer == rank) or (one.op == "recv_anysource" and wanted == "recv")
            for one in at.messages
        )


def _ends(graph: dict[Node, list[Node]]) -> list[set[Node]]:
    """Where waits end: parts of the graph that somebody waits for and from which no way leads out."""
    waited_for = {other for others in graph.values() for other in others}
    parts = [part for part in components(graph) if all(set(graph[node]) <= part for node in part)]
    return [part for part in parts if len(part) > 1 or (part & waited_for and not isinstance(next(iter(part)), tuple))]


def _ranks(nodes: Iterable[Node]) -> list[Rank]:
    return sorted(node for node in nodes if not isinstance(node, tuple))


# -------------------------------------------------------------------- verdicts


def _mismatch(board: _Board) -> Finding | None:
    """Operations under one number of one group, and not the same ones, while some member is still inside."""
    held: dict[_Group, set[int]] = {}
    for rank in board.at:
        for key, inside in board.waiting(rank):
            held.setdefault(key, set()).add(inside.sequence)
    for key, sequences in held.items():
        for sequence in sorted(sequences):
            launched = {rank: one for rank, at in key.at.items() if (one := _numbered(at, sequence)) is not None}
            if found := _at_odds(board, key, launched):
                return found
    return None


def find_odds(positions: Iterable[RankPosition]) -> Finding | None:
    """The earliest operation known on which members of a group differ, whether or not anybody is still inside of it."""
    board = _Board(positions, elsewhere=set(), halted=set())
    for key in board.groups:
        numbers = {one.sequence for at in key.at.values() for one in at.recent}
        for sequence in sorted(numbers):
            launched = {rank: one for rank, at in key.at.items() if (one := _numbered(at, sequence)) is not None}
            if found := _at_odds(board, key, launched):
                return found
    return None


def _numbered(at: GroupPosition, sequence: int) -> Collective | None:
    return next((one for one in at.recent or filter(None, [at.last]) if one.sequence == sequence), None)


def _at_odds(board: _Board, key: _Group, launched: dict[Rank, Collective]) -> Finding | None:
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
        reason = f"launched {tell(strange)} where {many} other ranks of group {key.name} launched {theirs}"
        return Finding(
            kind="mismatch", ranks=tuple(odd), probability=MISMATCH, reason=reason, evidence=tuple(told[:SHOWN])
        )
    reason = f"the members of group {key.name} launched different operations under number {ordinary.sequence}"
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
    world = len({rank for key in board.groups for rank in key.ranks})
    if len(sinks) * 2 > world or (len(sinks) * 2 == world and world > 2):
        return _nobody(board, "outside", f"{len(sinks)} of {world} ranks are in no collective: none of them is odd")
    silent = [rank for rank in sinks if rank not in board.at]
    if silent == list(sinks):  # a node that has not answered is no proof against its ranks
        return _nobody(
            board, "silent", f"rank {fold_ranks(silent)} does not tell where it stands, and others wait for it"
        )
    sinks = [rank for rank in sinks if rank in board.at]
    key, one, waiters = _waited_in(board, sinks)
    reason = f"{_lacking(board, sinks[0], key, one)}, in which {_count(waiters)}"
    sure = len(sinks) == 1 and not silent and not board.waits(sinks[0])
    chance = MISSING if sure else MANY_MISSING
    return Finding(
        kind="missing", ranks=tuple(sinks), probability=chance, reason=reason, evidence=_lines(board, first=sinks)
    )


def _lacking(board: _Board, rank: Rank, key: _Group, one: Collective) -> str:
    """What the rank has not done."""
    at = key.at.get(rank)
    if one.peer is not None:
        return f"has not begun its part of {tell(one)} of group {key.name}"
    if at is not None and at.launched >= one.sequence:
        return f"has been stopped inside of {tell(one)} of group {key.name}"
    if held := board.waiting(rank):
        other, still = held[0]
        inside = f"is still inside of {tell(still)} of group {other.name}"
        return f"{inside}, and has not launched {tell(one)} of group {key.name}"
    return f"has not launched {tell(one)} of group {key.name}"


def _waited_in(board: _Board, sinks: Sequence[Rank]) -> tuple[_Group, Collective, list[Rank]]:
    """The operation in which most ranks wait for one of ``sinks``, directly."""
    found: dict[tuple[_Group, int], list[tuple[Rank, Collective]]] = {}
    wanted = set(sinks)
    lacking: dict[tuple[_Group, int], bool] = {}
    for rank in board.at:
        for key, one in [*board.waiting(rank), *board.messages(rank)]:
            op = key, one.sequence
            if one.peer is None and op not in lacking:
                lacking[op] = not wanted.isdisjoint(board.missing(*op))
            if one.peer in wanted if one.peer is not None else lacking[op]:
                found.setdefault((key, one.sequence), []).append((rank, one))
    (key, _), waiters = max(found.items(), key=lambda item: len(item[1]))
    return key, waiters[0][1], [rank for rank, _ in waiters]


def _circle(board: _Board, graph: dict[Node, list[Node]]) -> Finding:
    """Ranks that wait for each other. If one rank went astray, every circle leads through it: see who is in them all.

    A circle of ranks that all keep to the program is impossible: the one of them that waits in the program's earliest
    operation waits for members that have none before it.
    """
    ranks = tuple(_ranks(graph))
    able = [rank for rank in _ranks(short_circle(graph)) if not has_circle(graph, without=rank)]
    evidence = _lines(board, first=able or ranks)
    if len(able) == 1 and (held := [*board.waiting(able[0]), *board.messages(able[0])]):
        other, astray = held[0]
        key, one, waiters = _waited_in(board, able)
        reason = (
            f"went on to {tell(astray)} of group {other.name} without {tell(one)} of group {key.name}, "
            f"in which {_count(waiters)}"
        )
        return Finding(kind="order", ranks=tuple(able), probability=ORDER, reason=reason, evidence=evidence)
    only = all(board.messages(rank) and not board.waiting(rank) for rank in ranks)
    what = "messages" if only else "collectives"
    suspects = tuple(sorted(able)) or ranks
    reason = f"ranks {fold_ranks(suspects)} wait for each other in {what}: they launched them in different orders"
    return _nobody(board, "messages" if only else "order", reason, suspects=suspects, evidence=evidence)


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
        key, one = next(iter(inside.values()))
        return (
            f"all members of group {key.name} have launched {tell(one)} and wait inside of it: none of them is to blame"
        )
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
