"""Dual run: another rank does the suspect's work, from the same state and with the same samples, and bits are compared.

A batch that gives NaN on one rank twice may be a bad batch, or a processor that multiplies these very numbers wrongly.
Only somebody else can tell. While the step is done once more, one or two witnesses take the suspect's random state and
read its samples; each rank notes the bits of its loss and of its own gradients before any reduction. The step is undone
afterwards, whatever it came to.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import distributed as dist

from keepstep.trainer.exchange_torch import gather, hand_out
from keepstep.trainer.fingerprint_torch import Hasher, together
from keepstep.trainer.guard import Trouble
from keepstep.trainer.plain_torch import decode_plain, encode_plain
from keepstep.trainer.provenance_torch import Trace
from keepstep.trainer.random_torch import put_random_states, random_states
from keepstep.trainer.state_torch import State
from keepstep.trainer.verdict import Judged

WITNESSES = 2
"""So that a majority names the odd one, where there are three ranks."""


class Outcome(NamedTuple):
    """``judged`` where the machine is to blame; else ``why`` says what the comparison came to."""

    judged: Judged | None
    why: str


def compare(trouble: Trouble, suspect: int, prints: Mapping[int, int], *, bad: bool) -> Outcome:
    """Who came to which bits. Pure.

    Args:
        prints: one number per rank that did the work, the suspect among them.
        bad: it went wrong on the suspect this time, too.
    """
    others = [rank for rank in prints if rank != suspect]
    said = ", ".join(map(str, others))
    if not bad:
        why = "the same input gave it twice and not the third time: it comes and goes"
        return Outcome(Judged("transient", trouble.step, why, (suspect,), trouble.tensor, tuple(others)), why)
    (most, count), *_ = Counter(prints[rank] for rank in others).most_common(1)
    if count < len(others):
        return Outcome(None, f"ranks {said} did the same work and do not agree: kernels are not deterministic here")
    if most == prints[suspect]:
        return Outcome(None, f"rank {said} did the same work and came to the same bits: it is not the machine")
    why = f"rank {said} did the same work from the same state and came to other bits"
    return Outcome(Judged("hardware", trouble.step, why, (suspect,), trouble.tensor, tuple(others)), why)


class DualRun:
    """One comparison, planned when a step has gone wrong twice on one rank.

    Args:
        trouble: names that rank.
        data: registered objects that can be asked for another rank's samples.
    """

    def __init__(self, trouble: Trouble, data: Mapping[str, Any], trace: Trace, rank: int) -> None:
        self.trouble, self._data, self._trace, self._rank = trouble, data, trace, rank
        self.suspect = trouble.ranks[0]
        world = dist.get_world_size()
        self.witnesses = tuple((self.suspect + 1 + n) % world for n in range(min(WITNESSES, world - 1)))
        self._homes: dict[str, int] = {}

    @property
    def words(self) -> str:
        return f"rank {', '.join(map(str, self.witnesses))} will do the work of rank {self.suspect} to compare"

    def begin(self) -> None:
        """The step begins: witnesses take the suspect's place. Collective."""
        mine = encode_plain(random_states(), "random states") if self._rank == self.suspect else b""
        size = int(gather(len(mine))[self.suspect])
        raw = bytearray(mine or bytes(size))
        hand_out(memoryview(raw), self.suspect)
        if self._rank in self.witnesses:
            put_random_states(decode_plain(bytes(raw)))
            for name, item in self._data.items():
                self._homes[name] = item.reads_as
                item.read_as(self.suspect_place(item))
        self._trace.fingerprint(Hasher())

    def suspect_place(self, item: Any) -> int:
        """The suspect's place among those that read different samples: as far from ours as its rank is."""
        return int((item.reads_as + self.suspect - self._rank) % item.places_in_all)

    def end(self, loss: Any) -> Outcome:
        """The step has been done. Collective."""
        value = float(loss.detach() if isinstance(loss, torch.Tensor) else loss or 0.0)
        own = [*self._trace.prints(), int.from_bytes(struct.pack("<d", value), "little", signed=True)]
        bad = value - value != 0.0 or bool(self._trace.first())
        self.leave()
        rows = gather([together(own), bad])
        prints = {rank: rows[rank][0] for rank in (self.suspect, *self.witnesses)}
        return compare(self.trouble, self.suspect, prints, bad=rows[self.suspect][1])

    def leave(self) -> None:
        """Read one's own samples again."""
        for name, home in self._homes.items():
            self._data[name].read_as(home)
        self._homes.clear()
        self._trace.fingerprint(None)


def impossible(trouble: Trouble, state: State, data: Mapping[str, Any]) -> str:
    """Why no other rank can do this work; empty when one can. The same on all ranks."""
    if not dist.is_initialized() or dist.get_world_size() < 2:
        return "there is no other rank"
    if len(trouble.ranks) != 1:
        return "it is not one rank's"
    if not state.replicated:
        return "state is sharded: no other rank holds what this one computes with"
    if not data or not all(hasattr(item, "read_as") for item in data.values()):
        return "the suspect's samples cannot be read on another rank (register a keepstep.StepData)"
    if any(item.places_in_all != dist.get_world_size() for item in data.values()):
        return "ranks do not each read samples of their own"
    return ""
