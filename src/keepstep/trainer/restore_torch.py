"""Restore: a rank's state from durable tiers, put together in its own slot file, then loaded like any snapshot.

All ranks first show what their node can read: the shared tier, and parts on the node's own disk. A generation counts
when somebody can read each of its parts. Its bytes are then brought into the slot, verified on the way; only a slot
that is complete is loaded, so that live state never becomes a mixture. What only another node can read is handed out
by it, part by part. All that arrives is counted in the heartbeat: a restore that moves is no hang.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from keepstep.checkpoint import generation, pair, reshard
from keepstep.checkpoint.agree import MAX_SAVED
from keepstep.checkpoint.config import CheckpointConfig
from keepstep.checkpoint.exceptions import CheckpointError, PayloadDamaged, TierError, TierMissing
from keepstep.checkpoint.generation import Part
from keepstep.checkpoint.notes import Note, Teller, TierLabel
from keepstep.checkpoint.progress import Progress
from keepstep.checkpoint.reader import Damage, Reader
from keepstep.checkpoint.reshard import Block, Piece
from keepstep.checkpoint.room import show
from keepstep.checkpoint.saved import Saved, Seen, complete, on_node, on_shared
from keepstep.checkpoint.slot import Description, Slot, Version
from keepstep.checkpoint.tainted import allowed
from keepstep.checkpoint.tiers.open import open_tier
from keepstep.ports.tier import Tier
from keepstep.trainer import refit_torch as refit
from keepstep.trainer.beat import Beat
from keepstep.trainer.exceptions import CannotResume, StateMismatch, StateNotPlain
from keepstep.trainer.exchange_torch import everybody, gather, hand_out
from keepstep.trainer.state_torch import State
from keepstep.trainer.together_torch import Together

SHIP = 16 * 1024 * 1024
"""Bytes that one node hands to the others at a time, of a part that only it can read."""
MEETING_TIER_S = 30.0
"""How long one operation of a tier that does not answer is tried again."""
READERS = 16
"""Descriptions that are read at the same time."""
_TROUBLE = (CheckpointError, StateMismatch, StateNotPlain, OSError, KeyError, ValueError)


class Durable:
    """The durable tiers of this job, as a rank that restores sees them.

    Args:
        beat: where bytes that arrive are counted.
        stop: true when whatever is under way is in vain.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        state: State,
        snap_dir: Path,
        *,
        notes: Teller | None = None,
        beat: Beat | None = None,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self._config, self._state, self._snap_dir = config, state, snap_dir
        self._notes, self._together = notes, Together(stop)
        self.beat = beat or Beat()
        self._tiers: list[Tier] = []
        self._saved: dict[Version, Saved] = {}
        self._rank = 0

    @property
    def where(self) -> str:
        """The tiers in words."""
        policy = self._config.policy
        return " and ".join(place for place in (policy.dir, policy.local_dir) if place)

    # ---------------------------------------------------------------- what there is

    def look(self, rank: int, world_size: int) -> tuple[Version, ...]:
        """Generations that this world can restore, newest first; the same on all ranks. Collective.

        Where the user does not want to resume, only those of this very run count: it may have to be restarted.

        Raises:
            CannotResume: the shared tier is there and cannot be read: starting anew could cost what it holds.
        """
        self._rank = rank
        seen, lost, problem = self._mine(rank)
        shown = gather([[msgspec.to_builtins(one) for one in seen], lost, problem])
        problem = next((why for _, _, why in shown if why), "")
        every = [msgspec.convert(rows, list[Seen]) for rows, _, _ in shown]
        policy, run = self._config.policy, self._config.run
        found = [one for one in complete(every, world_size) if policy.resume or (run and one.history[1] == run)]
        self._saved = {one.version: one for one in found}
        if not problem and not self._saved:
            problem = next((why for _, reasons, _ in shown for why in reasons), "")
        if problem and policy.resume:
            raise CannotResume(
                f"the checkpoints in {policy.dir} cannot be used: {problem}. Mend that, or begin anew with --no-resume"
            )
        return tuple(sorted(self._saved, reverse=True)[:MAX_SAVED])

    def _mine(self, rank: int) -> tuple[list[Seen], list[str], str]:
        """What this rank can read, what is there and of no use, and why the shared tier cannot be read, if so."""
        policy, problem = self._config.policy, ""
        seen: list[Seen] = []
        lost: list[str] = []
        self._tiers = []
        if policy.local_dir:
            try:
                local = open_tier(policy.local_dir, "local", budget_s=0)
                self._tiers.append(local)
                seen += on_node(local, allow_tainted=allowed())
            except TierMissing:
                pass
            except TierError as error:
                print(f"keepstep: rank {rank}: {error}; its checkpoints are left out", file=sys.stderr, flush=True)
        if policy.dir:
            try:
                shared = open_tier(policy.dir, "remote", budget_s=MEETING_TIER_S)
                self._tiers.append(shared)
                if rank == 0:
                    there, lost = on_shared(shared, allow_tainted=allowed())
                    seen += there
            except TierMissing:
                pass
            except CheckpointError as error:
                problem = str(error) if rank == 0 else ""
        return seen, lost, problem

    # ---------------------------------------------------------------- bringing it here

    def bring(self, version: Version, world_size: int, *, mine: bool, key: str = "") -> str | None:
        """Make this rank's slot hold ``version``. Collective, also for ranks that need nothing (``mine`` false).

        Returns:
            What went wrong on this rank, if anything.

        Raises:
            CannotResume: the checkpoint is sound and does not fit these objects or this world.
        """
        saved, rank, began = self._saved[version], self._rank, time.monotonic()
        reader = Reader(self._tiers, version, told=self._tell_damage(version), history=saved.history)
        work = _Work(self, saved, reader, rank, world_size, mine)
        work.own_part()
        if not everybody(work.satisfied):
            work.all_parts()
        work.compare()
        self._refuse_together(work.unfit)
        problem = self._together.run(lambda: self._try_to_fill(work, version, key, mine=mine))
        problem = work.ship(problem)
        if mine and problem is None:
            work.finish()
            self._tell_restored(reader, version, work.total, time.monotonic() - began)
        work.close()
        return problem

    def _refuse_together(self, unfit: str) -> None:
        reasons = [why for why in gather(unfit) if why]
        if reasons:
            raise CannotResume(reasons[0])

    def _try_to_fill(self, work: _Work, version: Version, key: str, *, mine: bool) -> str | None:
        """Returns what went wrong, if anything."""
        if not mine or work.problem is not None:
            return work.problem
        self.beat.restoring(True)
        try:
            self._fill(work, version, key)
        except _TROUBLE as error:
            return str(error)
        finally:
            self.beat.restoring(False)
        return None

    def _fill(self, work: _Work, version: Version, key: str) -> None:
        fit, reader = work.fit, work.reader
        assert fit is not None
        work.open(self._snap_dir, key)
        own = [block for block in fit.blocks if work.reads(block.rank)]
        say = (lambda line: print(f"keepstep: {line}", file=sys.stderr, flush=True)) if self._rank == 0 else None
        progress = Progress(f"restoring step {version.step}", sum(block.nbytes for block in own), say)

        def add(size: int) -> None:
            if self._together.in_vain():
                raise PayloadDamaged("given up: a newer epoch has been opened")
            self.beat.arrived(size)
            progress.add(size)

        reader.fill(reshard.reads(own), work.memory, add)

    def _tell_damage(self, version: Version) -> Callable[[Damage], None]:
        def tell(damage: Damage) -> None:
            print(f"keepstep: rank {self._rank}: {damage.why}; looking further", file=sys.stderr, flush=True)
            if self._notes is not None:
                label: TierLabel = "local" if damage.tier == "local" else "remote"
                self._notes.tell(Note(what="damaged", tier=label, step=version.step, rank=self._rank, why=damage.why))

        return tell

    def _tell_restored(self, reader: Reader, version: Version, total: int, seconds: float) -> None:
        came = reader.from_tier
        label: TierLabel = "local" if came.get("local", 0) > came.get("remote", 0) else "remote"
        if self._rank == 0:
            where = self._config.policy.local_dir if label == "local" else self._config.policy.dir
            what = f"saved in {where}; {show(total)} in {seconds:.1f} s"
            print(f"keepstep: going on from step {version.step} ({what})", file=sys.stderr, flush=True)
        if self._notes is not None:
            self._notes.tell(
                Note(what="restored", tier=label, step=version.step, rank=self._rank, bytes=total, seconds=seconds)
            )


class _Work:
    """One rank's share of one restore."""

    def __init__(self, durable: Durable, saved: Saved, reader: Reader, rank: int, world_size: int, mine: bool) -> None:
        self._state, self._beat = durable._state, durable.beat
        self.saved, self.reader = saved, reader
        self._rank, self._world, self._mine = rank, world_size, mine
        self._parts: dict[int, Part] = {}
        self.fit: refit.Fit | None = None
        self.problem: str | None = None
        self.unfit = ""
        """Why these objects cannot take this checkpoint; not a matter of another copy or generation."""
        self._files: pair.Pair | None = None
        self._slot: Slot | None = None
        self._key = ""
        self.memory = memoryview(b"")

    def reads(self, old: int) -> bool:
        return self._rank in self.saved.readers[old]

    @property
    def satisfied(self) -> bool:
        return not self._mine or self.fit is not None

    @property
    def total(self) -> int:
        return sum(entry.nbytes for entry in self.fit.entries) if self.fit is not None else 0

    def own_part(self) -> None:
        """Enough where this rank wrote everything that it holds."""
        if not self._mine or self.saved.world_size != self._world or not self.reads(self._rank):
            return
        try:
            part = self.reader.part(self._rank)
            if refit.alone(self._state, part, self._rank, self._world):
                self.fit = refit.fit(self._state, {self._rank: part}, self._rank, self._world)
        except _TROUBLE:
            self.fit = None  # all parts together will tell what is wrong

    def all_parts(self) -> None:
        """Every rank reads some of the descriptions; all get all of them. Collective."""
        world = self.saved.world_size
        turn = {old: readers[old % len(readers)] for old, readers in self.saved.readers.items()}
        mine = [old for old in range(world) if turn[old] == self._rank]
        found: list[tuple[int, bytes]] = []
        problem = ""
        try:
            with ThreadPoolExecutor(READERS, "parts") as pool:
                parts = list(pool.map(self._read_part, mine))
            found = [(old, generation.seal(part)) for old, part in zip(mine, parts, strict=True)]
        except _TROUBLE as error:
            problem = str(error)
        for rows, why in gather([found, problem]):
            self.problem = self.problem or why or None
            for old, data in rows:
                self._parts[old] = generation.unseal(data, Part, f"rank {old}'s part")
        if self._mine and self.problem is None:
            try:
                self.fit = refit.fit(self._state, self._parts, self._rank, self._world)
            except _TROUBLE as error:
                self.fit, self.unfit = None, str(error)

    def _read_part(self, old: int) -> Part:
        part = self.reader.part(old)
        self._beat.arrived(len(part.plain) or 1)
        return part

    def compare(self) -> None:
        """Tensors that belong to their rank go to another world only where all ranks' are equal."""
        if self.fit is None or self.problem is not None:
            return
        try:
            for one, other in self.fit.same:
                equal = _equal(self.reader, one, other)
                self._beat.arrived(one.nbytes)
                if not equal:
                    self.unfit = (
                        f"{one.name} differs between ranks {one.rank} and {other.rank} of the checkpoint, and is no "
                        f"distributed tensor: nobody can say what it is to another world size. Go on with "
                        f"{self.saved.world_size} ranks, or make it a DTensor or the same on all ranks"
                    )
                    return
        except _TROUBLE as error:
            self.problem = str(error)

    def open(self, snap_dir: Path, key: str) -> None:
        """A slot for the version: one that nobody would resume from instead."""
        assert self.fit is not None
        version = self.saved.version
        self._key = key
        self._files = pair.Pair(snap_dir, self._rank, files=pair.PINNABLE)
        self._slot = self._files.find(version) or self._files.slots[self._files.target(version.step)]
        self._slot.begin()
        self._slot.reserve(self.fit.end, beside=True)  # with its pages: faults one by one would hold up the reading
        self.memory = memoryview(self._slot.memory)

    def ship(self, problem: str | None) -> str | None:
        """Parts that some rank needs and its node cannot read, from one that can. Collective."""
        if self.saved.shared or all(len(readers) == self._world for readers in self.saved.readers.values()):
            return problem
        blocks: dict[int, list[Block]] = {}
        if self._mine and problem is None and self.fit is not None:
            for block in self.fit.blocks:
                if not self.reads(block.rank):
                    blocks.setdefault(block.rank, []).append(block)
        sizes = {old: part.payload for old, part in self._parts.items()}
        needed = sorted({old for olds in gather(sorted(blocks)) for old in olds})
        for old in needed:
            root = min(self.saved.readers[old])
            whole = bytearray(sizes[old] if old in blocks else 0)
            sound = self._ship_part(old, root, sizes[old], memoryview(whole))
            if not sound and old in blocks:
                problem = problem or f"rank {root}, whose node alone holds rank {old}'s part, could not read it"
            elif old in blocks:
                for block in blocks[old]:
                    reshard.copy(block, memoryview(whole), 0, self.memory)
        return problem

    def _ship_part(self, old: int, root: int, size: int, whole: memoryview) -> bool:
        scratch = memoryview(bytearray(min(SHIP, size)))
        sound = True
        for start in range(0, size, SHIP):
            end = min(size, start + SHIP)
            piece = whole[start:end] if len(whole) else scratch[: end - start]
            good = bytearray(b"\1")
            if self._rank == root:
                try:
                    piece[:] = self.reader.stretch(old, start, end)
                except _TROUBLE:
                    good = bytearray(b"\0")
            hand_out(memoryview(good), root)
            hand_out(piece, root)
            self._beat.arrived(len(piece))
            sound = sound and good == b"\1"
        return sound

    def finish(self) -> None:
        """All bytes are here: the version counts."""
        assert self.fit is not None
        assert self._slot is not None
        self.memory.release()
        description = Description(
            tensors=self.fit.entries,
            plain=self.fit.plain,
            key=self._key,
            world_size=self._world,
            replicated=self._state.replicated,
        )
        self._slot.complete(self.saved.version, self.fit.end, description)

    def close(self) -> None:
        self.memory.release()
        if self._files is not None:
            self._files.close()


def _equal(reader: Reader, one: Piece, other: Piece) -> bool:
    first: Any = bytes(reader.stretch(one.rank, one.offset, one.offset + one.nbytes))
    return bool(first == reader.stretch(other.rank, other.offset, other.offset + other.nbytes))
