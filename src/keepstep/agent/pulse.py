"""Looks at every rank many times a second: kernel state and heartbeat memory, and says so when one stops moving.

Costs the trainer nothing: it reads a page of shared memory and ``/proc/<pid>/stat``. Says where a rank stands, never
who is guilty. Standbys are looked at, too: one that cannot take a seat must not be counted on.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from keepstep.agent import proc
from keepstep.agent.beats import Beat, phase_of
from keepstep.agent.limits import AGENT_GAP_S, KEPT_STEPS, PARKED_SILENT_S, frozen_limit_s, stall_limit_s
from keepstep.agent.node import Node
from keepstep.agent.slots import Slot
from keepstep.model.beat import Phase, Word
from keepstep.model.facts import RankStalled, StallEnded, WorkerFrozen
from keepstep.model.ids import Epoch, Rank


class OnFrozen(Protocol):
    def __call__(self, cause: WorkerFrozen, /, *, trained: bool) -> None: ...


@dataclass
class _Watched:
    """What is remembered of one rank between two looks."""

    beat: Beat
    steps_ns: deque[int] = field(default_factory=lambda: deque(maxlen=KEPT_STEPS))
    commit_ns: int = 0
    epoch: int = 0
    beat_ns: int = 0
    waited_ns: int = 0
    """For a processor, in sum, when the beat last changed."""
    beat_seen: float = 0.0
    """When a standby's beat last changed, counting only the time in which we looked."""
    stalled: bool = False
    state: str = "R"
    state_since: float = 0.0
    frozen_told: bool = False
    cpu_ticks: int = 0
    looked_at: float = 0.0
    busy: float = 0.0


class Pulse:
    def __init__(self, node: Node) -> None:
        self._node = node
        self._watched: dict[str, _Watched] = {}
        self.on_frozen: OnFrozen = lambda cause, /, *, trained: None
        self.on_dead_standby: Callable[[Slot, str], None] = lambda slot, why: None

    async def run(self) -> None:
        interval = self._node.config.monitor_interval_s
        said = ""
        if self._node.hang.mode == "off":
            self._node.say("hang detection is off: only exits are noticed")
            return
        while True:
            await asyncio.sleep(interval)
            try:
                self.look(time.monotonic())
            except Exception as error:
                # A watchdog that fails must neither end the job nor go silent.
                if repr(error) != said:
                    said = repr(error)
                    self._node.say(f"internal error while looking at the ranks: {said}")

    def look(self, now: float) -> None:
        """One look at every worker and standby."""
        slots = {s.id: s for s in self._node.table if s.is_program and s.pid and not s.doomed}
        for gone in [name for name in self._watched if name not in slots]:
            self._watched.pop(gone).beat.close()
        for name, slot in slots.items():
            if name not in self._watched:
                with contextlib.suppress(OSError, ValueError):
                    self._watched[name] = _Watched(
                        Beat(self._node.dir, slot.id), state_since=now, looked_at=now, beat_seen=now
                    )
            if name in self._watched:
                self._look_at(slot, self._watched[name], now)

    def _look_at(self, slot: Slot, seen: _Watched, now: float) -> None:
        stat = proc.stat(slot.pid)
        if stat is None or stat.start != slot.start:
            return
        words = seen.beat.read()
        phase = phase_of(words) if words else Phase.STARTING
        if slot.role == "standby":
            self._look_at_standby(slot, seen, stat.state, words, now)
            return
        if now > seen.looked_at:
            seen.busy = (stat.cpu_ticks - seen.cpu_ticks) / proc.TICKS_PER_S / (now - seen.looked_at)
        seen.cpu_ticks, seen.looked_at = stat.cpu_ticks, now
        self._look_at_state(slot, seen, stat.state, phase, now)
        if words is not None:
            self._look_at_beat(slot, seen, words, phase)

    def _look_at_standby(
        self, slot: Slot, seen: _Watched, state: str, words: tuple[int, ...] | None, now: float
    ) -> None:
        if state != seen.state:
            seen.state, seen.state_since = state, now
        beat_ns = words[Word.BEAT_NS] if words else 0
        if beat_ns != seen.beat_ns or now - seen.looked_at > AGENT_GAP_S:
            # Where we have not looked for a while, we were stopped ourselves, and perhaps it was, too.
            seen.beat_ns, seen.beat_seen = beat_ns, now
        seen.looked_at = now
        phase = Phase.PARKED if slot.parked else Phase.SETUP
        limit = frozen_limit_s(state, phase, self._node.config.frozen_s, self._node.hang)
        held, silent = now - seen.state_since, now - seen.beat_seen
        if limit is not None and held >= limit:
            self.on_dead_standby(slot, f"in state {state} for {held:.1f} s")
        elif slot.parked and words and phase_of(words) is Phase.PARKED and silent >= PARKED_SILENT_S:
            self.on_dead_standby(slot, f"no sign of life for {silent:.0f} s")

    def _look_at_state(self, slot: Slot, seen: _Watched, state: str, phase: Phase, now: float) -> None:
        if state != seen.state:
            seen.state, seen.state_since, seen.frozen_told = state, now, False
        limit = frozen_limit_s(state, phase, self._node.config.frozen_s, self._node.hang)
        held = now - seen.state_since
        if limit is None or held < limit or seen.frozen_told:
            return
        seen.frozen_told = True
        fact = self._node.report(
            WorkerFrozen, slot=slot.id, rank=_rank(slot), epoch=slot.epoch, state=state, for_s=round(held, 3)
        )
        self.on_frozen(fact, trained=slot.resumed > 0)

    def _look_at_beat(self, slot: Slot, seen: _Watched, words: tuple[int, ...], phase: Phase) -> None:
        if words[Word.EPOCH] != seen.epoch:
            # The step in which a recovery fell says nothing about the rhythm.
            seen.epoch, seen.commit_ns = words[Word.EPOCH], words[Word.COMMIT_NS]
        elif words[Word.COMMIT_NS] != seen.commit_ns:
            seen.commit_ns = words[Word.COMMIT_NS]
            if words[Word.STEP_NS] > 0:
                seen.steps_ns.append(words[Word.STEP_NS])
        beat_ns = words[Word.BEAT_NS]
        if seen.stalled and (beat_ns != seen.beat_ns or words[Word.EPOCH] < slot.epoch):
            seen.stalled = False
            self._node.report(StallEnded, slot=slot.id, rank=_rank(slot), epoch=slot.epoch)
        waited_ns = proc.waited_for_cpu_ns(slot.pid)
        if beat_ns != seen.beat_ns:
            seen.beat_ns, seen.waited_ns = beat_ns, waited_ns
        limit = stall_limit_s(phase, seen.steps_ns, self._node.hang)
        idle = idle_s(time.monotonic_ns() - beat_ns, waited_ns - seen.waited_ns) if beat_ns else 0.0
        if limit is None or idle < limit or seen.stalled:
            return
        seen.stalled = True
        self._node.report(
            RankStalled,
            slot=slot.id,
            rank=_rank(slot),
            epoch=Epoch(words[Word.EPOCH]),
            step=words[Word.STEP],
            phase=phase.name,
            started=words[Word.STARTED],
            finished=words[Word.FINISHED],
            proc_state=seen.state,
            busy=round(min(seen.busy, 99.0), 2),
            idle_s=round(idle, 3),
            limit_s=round(limit, 3),
        )


def idle_s(silent_ns: int, waited_ns: int) -> float:
    """How much of a rank's silence counts, in seconds.

    Standing in the queue for a processor is the machine's doing, so only the time in which the rank could move counts;
    but at least half of the silence does, or one that loops on a busy machine would never be told.
    """
    return max(silent_ns - waited_ns, silent_ns // 2) / 1e9


def _rank(slot: Slot) -> Rank:
    return slot.rank if slot.rank is not None else Rank(-1)
