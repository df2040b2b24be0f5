"""Pace: once per window, how the time of each rank's steps went, for the mind to compare with the other nodes'.

A window of number N lasts from N to N + 1 times its length after the epoch's first commit. Ranks commit together, so
these are the same windows on all nodes without a word between them, and an agent that was started again finds its
place. Window 0 is the ramp-up, and is not told. All numbers come from heartbeat memory and from the kernel: it costs
the ranks nothing.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from keepstep.agent import proc, sockdiag
from keepstep.agent.beats import read_beat
from keepstep.agent.clocks import Clocks
from keepstep.agent.node import Node
from keepstep.agent.slots import Slot
from keepstep.agent.sockdiag import Traffic
from keepstep.model.beat import Word
from keepstep.model.facts import RanksPaced
from keepstep.model.ids import Epoch
from keepstep.model.pace import LinkPace, RankPace

LOOK_EVERY_S = 0.5
"""Between two looks for a first commit, while there is no epoch whose windows could be counted."""
LINKS_TOLD = 16
"""Other hosts per rank: those with the most traffic."""
LATE = 0.25
"""Share of a window by which its end may be missed; a look that comes later is not the end of this window."""
EARLY_NS = 5_000_000
"""A timer may fire that much before the boundary it was set to (event loops count milliseconds); it is meant still."""
Books = Callable[[], list[Traffic]]


@dataclass(frozen=True, slots=True)
class _Sample:
    """One rank at the end of a window: sums of its process's life."""

    words: tuple[int, ...]
    at_ns: int
    cpu_s: float
    starved_s: float
    links: dict[str, Traffic] = field(default_factory=dict)


class Paces:
    """This node's windows.

    Args:
        clocks, books: what the kernel says of the node and of its connections; doubles in tests.
    """

    def __init__(self, node: Node, *, clocks: Clocks | None = None, books: Books = sockdiag.connections) -> None:
        self._node, self._clocks, self._books = node, clocks or Clocks(), books
        self.window_s = 0.0
        """0 until the controller has said how long; none is measured before."""
        self._epoch, self._anchor, self._number = Epoch(0), 0, -1
        """The epoch whose windows are counted, its first commit, and the window that began at the last look."""
        self._samples: dict[tuple[str, int], _Sample] = {}
        self._hosts: dict[str, str] = {}
        self._said = ""

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self.pause_s(time.monotonic_ns()))
            try:
                if self.window_s > 0:
                    self.look(time.monotonic_ns())
                    await self._resolve()
            except Exception as error:
                # A clock that fails must not take the agent along.
                if repr(error) != self._said:
                    self._said = repr(error)
                    self._node.say(f"internal error while measuring the pace: {self._said}")

    def pause_s(self, now_ns: int) -> float:
        """To the end of the window that is under way."""
        if self.window_s <= 0 or not self._anchor:
            return min(LOOK_EVERY_S, self.window_s / 8) if self.window_s > 0 else LOOK_EVERY_S
        length = int(self.window_s * 1e9)
        return (length - (now_ns - self._anchor) % length) / 1e9

    def look(self, now_ns: int) -> None:
        """If a window ends now, report it; what it began with is what the one before ended with."""
        length = int(self.window_s * 1e9)
        slots = [s for s in self._node.table.workers() if s.pid and s.rank is not None and not s.doomed]
        read = {s.id: words for s in slots if (words := read_beat(self._node.dir, s.id)) is not None}
        current = self._node.roster.epoch if self._node.roster is not None else Epoch(0)
        mine = [s for s in slots if s.id in read and read[s.id][Word.EPOCH] == current]
        anchor = min((first for s in mine if (first := read[s.id][Word.FIRST_NS])), default=0)
        if not anchor:
            self._epoch, self._anchor, self._number, self._samples = current, 0, -1, {}
            return
        if current != self._epoch or abs(anchor - self._anchor) > length // 8:  # another epoch, or a rollback in it
            self._epoch, self._anchor, self._number, self._samples = current, anchor, -1, {}
        number, past = divmod(now_ns + EARLY_NS - self._anchor, length)
        if past > LATE * length:
            self._number, self._samples = -1, {}  # too late for a boundary: the next window begins at the next one
            return
        before, ended = self._samples, self._number
        if number == ended:
            return
        self._samples, self._number = self._sample(mine, now_ns), number
        machine = self._clocks.read()
        if ended < 1 or number != ended + 1:
            return
        paces = [pace for slot in mine if (pace := self._pace(slot, before)) is not None]
        if paces:
            paces.sort(key=lambda pace: pace.rank)
            self._node.report(
                RanksPaced, epoch=current, window=ended, seconds=self.window_s, ranks=tuple(paces), machine=machine
            )

    # ------------------------------------------------------------ one rank

    def _sample(self, mine: list[Slot], now_ns: int) -> dict[tuple[str, int], _Sample]:
        try:
            books = self._books()
        except OSError:
            books = []  # this kernel does not show them: links cannot be told apart
        samples: dict[tuple[str, int], _Sample] = {}
        for slot in mine:
            stat, words = proc.stat(slot.pid), self._steady(slot)
            if stat is None or stat.start != slot.start or words is None:
                continue
            samples[slot.id, slot.start] = _Sample(
                words=words,
                at_ns=now_ns,
                cpu_s=stat.cpu_ticks / proc.TICKS_PER_S,
                starved_s=proc.waited_for_cpu_ns(slot.pid) / 1e9,
                links=self._links(slot.pid, books) if books else {},
            )
        return samples

    def _steady(self, slot: Slot) -> tuple[int, ...] | None:
        """The words between two commits: read twice, since a commit stores several of them."""
        for _ in range(3):
            first, second = read_beat(self._node.dir, slot.id), read_beat(self._node.dir, slot.id)
            if first is not None and second is not None and _committed(first) == _committed(second):
                return second
        return None

    def _pace(self, slot: Slot, before: dict[tuple[str, int], _Sample]) -> RankPace | None:
        """What lies between the two samples; ``None`` without a steady step between them."""
        old, new = before.get((slot.id, slot.start)), self._samples.get((slot.id, slot.start))
        if old is None or new is None or slot.rank is None:
            return None
        words = [b - a for a, b in zip(old.words, new.words, strict=True)]
        steps = words[Word.PACED]
        if steps <= 0 or words[Word.STEP] < steps or old.words[Word.EPOCH] != new.words[Word.EPOCH]:
            return None

        def mean(word: Word) -> float:
            return round(words[word] / steps / 1e9, 9)

        # The kernel's sums are of the whole window, and steady steps are a part of it.
        share = words[Word.PACED_NS] / max(1, new.at_ns - old.at_ns) / steps
        return RankPace(
            rank=slot.rank,
            first=old.words[Word.STEP],
            last=new.words[Word.STEP],
            step_s=mean(Word.PACED_NS),
            wait_s=mean(Word.WAIT_NS),
            data_s=mean(Word.DATA_NS),
            gc_s=mean(Word.GC_NS),
            save_s=mean(Word.SAVE_NS),
            starved_s=round(max(0.0, new.starved_s - old.starved_s) * share, 9),
            cpu_s=round(max(0.0, new.cpu_s - old.cpu_s) * share, 9),
            size=words[Word.SIZE] // steps,
            links=_between(old.links, new.links),
        )

    # ------------------------------------------------------------ links

    def _links(self, pid: int, books: list[Traffic]) -> dict[str, Traffic]:
        """A process's connections to other nodes of the roster, all of one host in one."""
        own, found = sockdiag.sockets_of(pid), dict[str, Traffic]()
        for one in books:
            host = self._hosts.get(one.peer)
            if host is None or one.inode not in own:
                continue
            known = found.get(host)
            found[host] = one if known is None else _together(known, one)
        return found

    async def _resolve(self) -> None:
        """Addresses of the roster's other nodes; a name is asked for once."""
        places = self._node.roster.places if self._node.roster is not None else ()
        hosts = {place.host for place in places if place.node != self._node.id and place.host != self._node.config.host}
        if set(self._hosts.values()) == hosts:
            return
        addresses: dict[str, str] = {}
        for host in hosts:
            try:
                known = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
            except OSError:
                continue
            addresses |= {str(info[4][0]): host for info in known}
        self._hosts = addresses


def _committed(words: tuple[int, ...]) -> tuple[int, ...]:
    """What a commit stores."""
    return words[Word.STEP], *words[Word.FIRST_NS : Word.SIZE + 1]


def _together(one: Traffic, other: Traffic) -> Traffic:
    return Traffic(
        peer=one.peer,
        inode=0,
        bytes=one.bytes + other.bytes,
        resent=one.resent + other.resent,
        rtt_ms=max(one.rtt_ms, other.rtt_ms),
        busy_s=max(one.busy_s, other.busy_s),  # they are busy at the same time
    )


def _between(old: dict[str, Traffic], new: dict[str, Traffic]) -> tuple[LinkPace, ...]:
    found = []
    for host, now in new.items():
        was = old.get(host)
        if was is None or now.bytes < was.bytes:
            continue  # connected anew within the window
        found.append(
            LinkPace(
                host=host,
                bytes=now.bytes - was.bytes,
                resent=max(0, now.resent - was.resent),
                rtt_ms=round(now.rtt_ms, 3),
                blocked_s=round(max(0.0, now.busy_s - was.busy_s), 6),
            )
        )
    found.sort(key=lambda link: link.bytes, reverse=True)
    return tuple(found[:LINKS_TOLD])
