"""Who said nothing: the rank or the machine that everybody else waited for."""

from __future__ import annotations

import re
from collections import Counter

from keepstep.core.diagnose.observe import Log

FEW_ABSENT = 16
"""More ranks than this missing from the time-outs say nothing about any of them."""
WIDEST = 100_000
_WAITED = ("collective_timeout", "collective_abort", "peer_lost", "store_lost", "nccl_error", "connection_refused")
_LIST = re.compile(r"\branks? ((?:\d{1,6}(?: ?(?:-|\.\.|to) ?\d{1,6})?(?:, ?| and | & )?)+)", re.IGNORECASE)
_PART = re.compile(r"(\d{1,6})(?: ?(?:-|\.\.|to) ?(\d{1,6}))?")
_EXCEPT = re.compile(
    r"\b(?:all|every|each)\b.{0,30}\b(?:ranks?|but|except|others).{0,20}(?:but|except|besides|other than)[^\d]{0,20}(\d{1,6})",
    re.IGNORECASE,
)
_WAITS = re.compile(
    r"wait|same|time(?:d|s)?[- ]?out|blocked|\bin (?:all|barrier|reduce|broadcast|nccl)|hang|fine|arrived|joined",
    re.IGNORECASE,
)


def ranks_listed(text: str) -> set[int]:
    """Ranks of ``ranks 0-36, 38-63``; empty where the text lists none."""
    found: set[int] = set()
    for part in _LIST.findall(text):
        for low, high in _PART.findall(part):
            last = int(high or low)
            if int(low) <= last < int(low) + WIDEST:
                found.update(range(int(low), last + 1))
    return found


def absent(log: Log) -> list[int]:
    """Ranks that everybody waited for, when they are few beside those who waited."""
    waiting = {one.rank for one in log.findings.get("collective_timeout", ()) if one.rank is not None} | set(log.works)
    latest = max((work.seq for work in log.works.values()), default=0)
    behind = sorted(rank for rank, work in log.works.items() if work.seq < latest)
    for line in log.lists:
        if found := _EXCEPT.search(line.text):
            return [int(found[1])]
        if _WAITS.search(line.text):
            waiting |= ranks_listed(line.text)
    if len(waiting) < 2:
        return []
    world = log.places.world or max(max(waiting), max(log.places.ranks, default=0)) + 1
    if len(waiting) * 2 > world and world <= WIDEST:
        spoken = {one.rank for id in _WAITED for one in log.findings.get(id, ()) if one.rank is not None}
        silent = set(range(world)) - waiting
        missing = sorted(silent - spoken) or sorted(silent)
    else:
        missing = []
    found_ranks = missing or behind
    return found_ranks if 0 < len(found_ranks) <= FEW_ABSENT and len(found_ranks) * 2 < world else []


def home(ranks: list[int], log: Log) -> str:
    """The one machine of all these ranks, as far as the log tells; else nothing."""
    nodes = {log.places.node_of.get(rank, "") for rank in ranks}
    if len(nodes) == 1:
        return nodes.pop()
    known = Counter(node for node in nodes if node)
    return next(iter(known)) if len(known) == 1 else ""
