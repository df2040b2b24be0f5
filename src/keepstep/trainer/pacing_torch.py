"""Pacing: which steps get a snapshot, how it is copied, and what ranks agree on about that."""

from __future__ import annotations

import os
import sys
import time
from typing import cast

import torch
from torch import distributed as dist

from keepstep.checkpoint.notes import Note, TierLabel
from keepstep.model.env import COPY
from keepstep.trainer.budget import DEFAULT_SHARE, Mode, Pace, agree_after
from keepstep.trainer.exceptions import StepMisused
from keepstep.trainer.exchange_torch import keep
from keepstep.trainer.gate import Gate
from keepstep.trainer.snapshots_torch import Snapshots

MODES = ("auto", "blocking", "overlapped")


def copy_mode() -> Mode:
    """What ``KEEPSTEP_COPY`` says."""
    word = os.environ.get(COPY, "") or "auto"
    if word not in MODES:
        raise StepMisused(f"{COPY}={word!r} is none of {', '.join(MODES)}; leave it unset to let the cost decide")
    return cast(Mode, word)


class Pacing:
    """One rank's plan for its snapshots.

    Args:
        total: steps of the run; the last one gets a durable snapshot where there are durable tiers.
    """

    def __init__(self, snapshots: Snapshots, rank: int, total: int) -> None:
        self._snapshots, self._rank, self._total = snapshots, rank, total
        policy = snapshots.config.policy
        self.share = policy.overhead
        self._durable_every = max(1, policy.every) if snapshots.config.durable else 0
        mode = copy_mode()
        if mode == "overlapped":
            snapshots.overlap_from = 0
        self.pace = Pace(self.share, mode)
        self.every = 1
        """Steps between full snapshots; 0 for none but the durable ones."""
        self.held = -1
        """Newest step that is to be held for the durable tiers."""
        self._from = 0
        self._taken = self._beside = False

    @property
    def overlap(self) -> bool:
        return self.pace.overlapped

    def restart(self, step: int, every: int) -> None:
        """A loop begins, or goes on after a recovery.

        Args:
            every: the job's interval.
        """
        self.every = 1 if self.share > 0 and every > 0 else every
        self._from = step
        self.pace.restart()

    def full(self, step: int) -> bool:
        """Whether this step gets a full snapshot."""
        return (self.every > 0 and step % self.every == 0) or self.durable(step)

    def durable(self, step: int) -> bool:
        """Whether the durable tiers get this step."""
        if not self._durable_every or step <= 0:
            return False
        return step % self._durable_every == 0 or step == self._total

    def step(self) -> None:
        """A step is complete, up to its snapshot."""
        self.pace.step(time.monotonic(), self._snapshots.waited_s, snapshot=self._taken)

    def saved(self, *, full: bool) -> None:
        """The snapshot of a step has been taken, or begun."""
        self._taken = full
        if not full:
            return
        beside = self._snapshots.copied_s is None and self._snapshots.whole
        if self._snapshots.copied_s is not None:
            self.pace.copied(self._snapshots.copied_s)
        if beside != self._beside:  # not what is wanted, but what was done: small state is never copied beside a step
            self._beside = beside
            if self._rank == 0:
                self._note_mode()

    def too_dear(self, gate: Gate) -> bool:
        """Whether to go on without waiting for another node's copy: it costs more than the user's budget."""
        if self.share <= 0 or not gate.too_dear(self.pace.step_s, self.share):
            return False
        # No gap: copies go on, only a step behind, and the gate says it when they do not.
        why = (
            f"{self._rhythm}, and steps no longer wait for the copy on another node: that costs more than "
            f"{self.share:.2%} of a step of {self.pace.step_s * 1e3:.1f} ms"
        )
        self._tell_pace("peer", self._snapshots.lag()[0], why)
        return True

    def agree_to_hold(self, step: int) -> None:
        """Where the durable tiers are due, find out whether every rank has its hands free; collective then.

        A generation that one rank has to leave out is no generation: then all leave it out.
        """
        if not self.durable(step):
            return
        busy = self._snapshots.pins.held()
        count = torch.tensor([len(busy)], dtype=torch.int64)
        dist.all_reduce(keep(count))
        if int(count) == 0:
            self.held = step
        elif self.held == step:
            self.held = -1  # a try that was rolled back had agreed to it
        if busy:
            self._snapshots.pins.skip(step, busy[0])

    def agree(self, step: int) -> bool:
        """Where it is time for that, choose the interval that suits the slowest rank; collective then.

        Returns:
            Whether it is another one now.
        """
        if self.share <= 0 or self.every <= 0 or not agree_after(step - self._from):
            return False
        mine = torch.tensor([self.pace.wanted()], dtype=torch.int64)
        dist.all_reduce(keep(mine), op=dist.ReduceOp.MAX)
        before, self.every = self.every, int(mine)
        if self.every == before:
            return False
        if self._rank == 0:
            self._tell(step, before)
        return True

    def _tell(self, step: int, before: int) -> None:
        cost, own = self.pace.cost_s, self.pace.step_s
        why = (
            f"every {self.every} steps instead of {before}: here a snapshot costs {cost * 1e3:.1f} ms of a step of "
            f"{own * 1e3:.1f} ms, and may take {self.share:.2%}"
        )
        self._tell_pace("memory", step, why, cost)

    @property
    def _rhythm(self) -> str:
        return "every step" if self.every == 1 else f"every {self.every} steps"

    def _note_mode(self) -> None:
        copy_s, own = self.pace.copy_s, self.pace.step_s
        how = "beside the next step" if self._beside else "before the commit returns, as at first"
        why = (
            f"{self._rhythm}, copied {how}: the copy takes {copy_s * 1e3:.1f} ms of a step of "
            f"{own * 1e3:.1f} ms, and steps may wait {self.share or DEFAULT_SHARE:.2%} for it"
        )
        self._note("memory", self._snapshots.lag()[0], why, copy_s)

    def _tell_pace(self, tier: TierLabel, step: int, why: str, cost: float = 0.0) -> None:
        """To people and to the log, which shows the newest of these as the job's pace."""
        self._note(tier, step, why, cost)
        who = "" if self._rank == 0 else f"rank {self._rank}: "
        print(f"keepstep: {who}snapshots {why}", file=sys.stderr, flush=True)

    def _note(self, tier: TierLabel, step: int, why: str, cost: float) -> None:
        note = Note(what="interval", tier=tier, step=step, rank=self._rank, why=why, seconds=cost)
        self._snapshots.notes.tell(note)
