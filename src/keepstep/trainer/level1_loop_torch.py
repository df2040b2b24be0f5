"""The loop of level 1: restores once, takes snapshots at commits, and waits at the end until the last is durable."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from keepstep.checkpoint.slot import Version
from keepstep.model import env
from keepstep.model.topology import fold_ranks
from keepstep.trainer.attendant import FINISH_S
from keepstep.trainer.attended import say
from keepstep.trainer.ending_torch import Ending
from keepstep.trainer.exchange_torch import everybody
from keepstep.trainer.final import say_if_over, until_durable
from keepstep.trainer.gate import Gate, needs_replica
from keepstep.trainer.pacing_torch import Pacing
from keepstep.trainer.recovery_torch import Found, Restorer, everybody_is_here
from keepstep.trainer.saver import Saver
from keepstep.trainer.steps import Step, require_entered

if TYPE_CHECKING:
    from keepstep.trainer.level1_torch import Level1


class Level1Loop:
    """One ``ks.steps(total)`` with snapshots, where nobody replaces a rank."""

    def __init__(self, part: Level1, total: int, start: int) -> None:
        self._p = part
        self._total, self._start = total, start
        self.done = start
        self._pacing = Pacing(part.snapshots, part.rank, total)
        self._gate = Gate(part.snapshots, part.rank, lambda: False)
        self._saver = Saver(part.snapshots, part.rank, replaced=False)
        self._due = self._handed = self._gated = False

    def run(self) -> Iterator[Step]:
        self._enter()
        while self.done < self._total:
            step = Step(self, self.done)
            yield step
            require_entered(step)
        self._finish()

    def _enter(self) -> None:
        part = self._p
        part.state.bind()
        part.check_room()
        found = self._restore()
        if found is None or found.version is None:
            part.snapshots.forget_all()
            self._reserve()
            self._begin(self._start)
            self._save(Version(self._start, part.roster.epoch), first=True)
            return
        self._reserve()
        self._begin(found.version.step)
        if part.rank == 0 and found.source != "saved":  # of that the restore has told, with how much and how fast
            say(None, f"going on from step {found.version.step} ({found.source})")
        say_if_over(found.version.step, self._total, part.rank)
        if found.version not in part.snapshots.private():
            self._save(found.version, first=True)

    def _reserve(self) -> None:
        part = self._p
        part.snapshots.watch(part.state)
        part.snapshots.reserve(part.state.expected_bytes())

    def _begin(self, step: int) -> None:
        self.done = step
        self._p.state.touched = False
        self._pacing.restart(step, self._p.config.snapshot_every)
        self._gate.restart()
        self._set_gate()

    def _set_gate(self) -> None:
        """Where there is no keeper waiting for it would be in vain, and that has been said."""
        part = self._p
        copied = part.has_buddy and part.line.keeper_port > 0
        self._gated = copied and needs_replica(self._pacing.every, part.state.replicated)

    def _restore(self) -> Found | None:
        """The newest state that all ranks can have; ``None`` to start at the beginning."""
        part = self._p
        restorer = Restorer(part.state, part.snapshots, part.token, part.snap_dir, lambda: False)
        found = restorer.meet(part.roster, part.rank, None, newcomer=True, all_new=True)
        if found.version is not None and found.version.step < self._start:
            say(part.rank, f"step {found.version.step} is not taken: the script starts at step {self._start}")
            return None
        return found

    def _finish(self) -> None:
        """Nobody leaves before all have committed the last step, and before that is durable."""
        part = self._p
        part.snapshots.settle()
        everybody_is_here()
        waits = f"the end of the run waits until step {self.done} is complete in the durable tiers"
        whole, lost = Ending(
            lambda: part.line.finish(FINISH_S if self._handed_over() else 0.0),
            lambda: part.lost_parts(Version(self.done, part.roster.epoch)) if self._due else [],
            lambda words: say(None, f"{waits}: {words}") if part.rank == 0 else None,
        ).run()
        if lost and part.rank == 0:
            say(
                None,
                f"step {self.done} is not complete in {part.config.policy.dir}, and never will be: the part of rank "
                f"{fold_ranks(lost)} could not be written; archiver.log in that node's directory tells why",
            )
        if self._handed and whole is not True and not lost:
            say(part.rank, f"step {self.done} is written, but not known to be complete on all nodes")

    def _handed_over(self) -> bool:
        """Whether the archiver has taken the last step; one that was restored has come from there."""
        part = self._p
        version = Version(self.done, part.roster.epoch)
        if part.config.durable and self.done > 0 and version in part.snapshots.full():
            self._due = True
            archiver = part.node_dir / env.ARCHIVER_SOCKET
            pins = part.snapshots.pins
            self._handed = until_durable(pins, version, archiver=archiver, rank=part.rank, stop=lambda: False)
        return self._handed

    # ---------------------------------------------------------------- one step

    def begin(self, step: Step) -> None:
        pass

    def commit(self, step: Step, loss: Any) -> None:
        """The step is complete on this rank."""
        part, done = self._p, step.index + 1
        if part.who.device.startswith("cuda"):
            torch.cuda.current_stream().synchronize()
        part.state.settle_buckets()
        self.done = done
        part.state.touched = False
        self._save(Version(done, part.roster.epoch))
        if self._pacing.agree(done):
            self._set_gate()
        if part.has_buddy and not self._gated:
            self._gate.look(done)

    def _save(self, version: Version, *, first: bool = False) -> None:
        part, pacing = self._p, self._pacing
        pacing.step()
        full = first or pacing.full(version.step)
        if full:
            if not first:
                # Before the version before the last is overwritten, all ranks must hold the last one whole, and so must
                # the nodes that have the copies: a lost node's state comes from there.
                part.snapshots.await_copy()
                if self._gated:
                    self._await_replica(version.step - 1)
                if not everybody(part.snapshots.whole) and not part.state.replicated:
                    part.snapshots.forget_newest()
                if version.step < self._total:  # the last step is handed over at the end of the loop
                    pacing.agree_to_hold(version.step)
            self._saver.save(
                part.state,
                version,
                key=part.roster.key,
                full=True,
                ring=True,
                world_size=part.who.world_size,
                overlap=pacing.overlap and not first and version.step < self._total,
                pin=not first and version.step == pacing.held,
            )
        pacing.saved(full=full)

    def _await_replica(self, step: int) -> None:
        self._gate.wait(step)
        if self._p.state.replicated and self._pacing.too_dear(self._gate):
            self._gated = False

    def rewind(self, step: int) -> None:
        """The guard has put the state of ``step`` back on all ranks: what was saved of later ones is untrue."""
        version = Version(step, self._p.roster.epoch)
        self._p.snapshots.forget_after(version)
        self._begin(step)
        if version not in self._p.snapshots.full():
            self._save(version, first=True)

    def failed(self, step: Step, error: Exception) -> bool:
        return False

    def interrupted(self) -> bool:
        return False

    def torn(self) -> bool:
        return False
