"""The stacks of all ranks as one tree: the calls that they share once, and where each set of ranks goes its own way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from keepstep.cli.say import plural
from keepstep.core.locate.collectives import line
from keepstep.core.locate.stacks import called, short, waits_for, without_starters
from keepstep.model.ids import Rank
from keepstep.model.position import RankPosition
from keepstep.model.stacks import ProcessStacks
from keepstep.model.topology import fold_ranks


@dataclass
class _Branch:
    """A call, the ranks that are in it, and the calls that it has made on some of them."""

    told: str
    ranks: list[Rank] = field(default_factory=list)
    further: dict[str, _Branch] = field(default_factory=dict)


def tree(processes: Sequence[ProcessStacks], positions: Mapping[Rank, RankPosition]) -> list[str]:
    """Lines of the tree, ranks with the most company first, what each set of ranks waits for at its leaf."""
    root = _Branch("")
    ends: dict[Rank, tuple[str, str]] = {}
    for process in sorted((p for p in processes if p.role == "trainer"), key=lambda p: p.rank):
        ends[process.rank] = _doing(process), _where(positions.get(process.rank))
        _add(root, process)
    lines: list[str] = []
    _draw(root, ends, "", lines)
    return lines


def _add(root: _Branch, process: ProcessStacks) -> None:
    thread = process.main
    at = root
    at.ranks.append(process.rank)
    for frame in reversed(without_starters(thread.frames) if thread else []):
        told = f"{frame.function} ({short(frame.file)}:{frame.line})"
        at = at.further.setdefault(called(frame), _Branch(told))
        at.ranks.append(process.rank)


def _doing(process: ProcessStacks) -> str:
    waits = waits_for(process)
    asleep = f" in {process.wchan}" if process.wchan else ""
    return f"{_WORDS[waits]} (state {process.state}{asleep})"


def _where(position: RankPosition | None) -> str:
    return "" if position is None else line(position)


_WORDS: Mapping[str, str] = {
    "collective": "in a collective",
    "data": "waiting for data",
    "storage": "waiting for a file system or a device",
    "lock": "waiting for a lock",
    "sleep": "asleep",
    "stopped": "stopped by a signal",
    "ended": "ended",
    "computing": "computing",
    "unknown": "somewhere unknown",
}


def _draw(at: _Branch, ends: Mapping[Rank, tuple[str, str]], indent: str, lines: list[str]) -> None:
    """The branches below ``at``; a call that all of its ranks share goes on without another step to the right."""
    branches = sorted(at.further.values(), key=lambda branch: (-len(branch.ranks), branch.ranks))
    inside = {rank for branch in branches for rank in branch.ranks}
    leaves = _leaves([rank for rank in at.ranks if rank not in inside], ends)
    count = len(branches) + len(leaves)
    for number, branch in enumerate(branches):
        alone, last = count == 1, number == count - 1
        mark, deeper = ("", "") if alone and lines else ("└─ ", "   ") if last else ("├─ ", "│  ")
        who = "" if alone and lines else f"{_who(branch.ranks)}: "
        lines.append(f"{indent}{mark}{who}{branch.told}")
        _draw(branch, ends, indent + deeper, lines)
    for number, (told, ranks) in enumerate(leaves, len(branches)):
        mark = "└─ " if number == count - 1 else "├─ "
        lines.append(f"{indent}{mark}{_who(ranks)} {told}")


def _leaves(ranks: Sequence[Rank], ends: Mapping[Rank, tuple[str, str]]) -> list[tuple[str, list[Rank]]]:
    found: dict[str, list[Rank]] = {}
    for rank in ranks:
        found.setdefault(", ".join(filter(None, ends[rank])), []).append(rank)
    return sorted(found.items(), key=lambda item: -len(item[1]))


def _who(ranks: Sequence[Rank]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"{plural(len(ranks), 'rank')} ({fold_ranks(ranks)})"
