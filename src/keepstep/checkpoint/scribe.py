"""Scribe: writes one pinned version of one rank to every tier, and lifts the pin as early as that is safe.

The nearest tier that works is written from the slot. Once that part has been read back the pin goes; the other tiers
get their copy from there. A difference is written where every tier holds what it rests on, so that all tiers hold the
same bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec import Struct

from keepstep.checkpoint import archive, catalog
from keepstep.checkpoint.basis import Basis
from keepstep.checkpoint.config import CheckpointConfig
from keepstep.checkpoint.exceptions import (
    CheckpointError,
    NotEnoughMemory,
    PayloadDamaged,
    SlotDamaged,
    SlotInvalid,
    TierError,
)
from keepstep.checkpoint.generation import Part
from keepstep.checkpoint.notes import Note
from keepstep.checkpoint.slot import Slot, Version
from keepstep.checkpoint.source import Source
from keepstep.checkpoint.target import Target
from keepstep.checkpoint.todo import Todo

SEAL_WAIT_S = 0.3
"""How long the keeper may take for the checksums before the archiver computes them itself; both come to the same."""
SEAL_LOOK_S = 0.02
NO_MEMORY = "the archiver has no memory to write with; free some on this node, or --ckpt-full-every 1 needs less"
WRITE_TRIES = 2
"""How often a part is written whose bytes read back otherwise."""


class Written(Struct, frozen=True, kw_only=True):
    """What became of one rank's version. ``parts``: by tier label, where it is whole."""

    rank: int
    version: Version
    world_size: int
    parts: dict[str, Part]


class Scribe:
    """Writes parts; remembers per rank what the next difference may rest on."""

    def __init__(
        self, tell: Callable[[Note], None], todo: Todo, *, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._tell, self._todo, self._sleep = tell, todo, sleep
        self._bases: dict[int, Basis] = {}
        self._looked: dict[str, tuple[Version, bool]] = {}
        """By tier label: the base that was looked at last, once for all ranks of this node, and whether it is sound."""

    def write(self, path: Path, rank: int, config: CheckpointConfig, targets: Sequence[Target]) -> Written | None:
        """Bring the pinned version of a slot into the tiers. Never raises for a tier's or the slot's troubles.

        Returns:
            ``None`` when the slot holds nothing to write any more.
        """
        try:
            slot = Slot(path)
        except (OSError, SlotInvalid):
            return None
        try:
            if not slot.pinned:
                return None
            serial = slot.serial
            try:
                return self._write(slot, rank, config, targets)
            except SlotDamaged as error:
                self._bases.pop(rank, None)
                self._note(slot, rank, "damaged", str(error))
            except SlotInvalid as error:
                self._note(slot, rank, "skipped", str(error))
            finally:
                if slot.serial == serial:
                    slot.unpin()
        finally:
            slot.close()
        return None

    def _write(self, slot: Slot, rank: int, config: CheckpointConfig, targets: Sequence[Target]) -> Written:
        serial = slot.serial
        self._await_seal(slot)
        source = Source.of_slot(slot)
        world_size = source.description.world_size
        written = Written(rank=rank, version=source.version, world_size=world_size, parts={})
        basis = self._bases.setdefault(rank, Basis())
        full_every = config.policy.full_every
        rests = basis.serves(source, full_every) and all(
            t.last.get(rank) == basis.version and self._sound(t, basis.version, rank) for t in targets
        )
        first: Target | None = None
        part: Part | None = None
        for target in targets:
            if first is None or part is None:
                began, began_ns = time.monotonic(), time.time_ns()
                part = self._first(target, source, rank, world_size, config, basis if rests else None)
                if part is None:
                    continue
                first = target
                took_s = time.monotonic() - began if part.written_ns >= began_ns else 0.0  # else it was there already
                self._hold(basis, source, part, full_every, took_s)
                if target is not targets[-1]:
                    self._todo.add(part.version, rank)
                if slot.serial == serial:
                    slot.unpin()
            elif not self._copy(first, target, part):
                continue
            written.parts[target.label] = part
            target.last[rank] = part.version
        self._todo.done(source.version, rank)
        return written

    def _sound(self, target: Target, base: Version, rank: int) -> bool:
        """Whether nobody has found damage in what a difference would rest on; where nobody can say, there is none.

        A base that still waits for other nodes' parts has no manifest yet that says what it rests on: this rank's own
        part says it then.
        """
        known = self._looked.get(target.label)
        if known is not None and known[0] == base:
            return known[1]
        sound, at = True, base
        try:
            tier = target.open()
            while not (found := catalog.look(tier, at)).complete:
                under = catalog.part(tier, at, rank).base
                if found.damaged or under is None:
                    sound = not found.damaged
                    break
                at = under
        except TierError:
            pass  # away: writing will tell
        except CheckpointError:
            sound = False
        self._looked[target.label] = base, sound
        return sound

    def catch_up(self, targets: Sequence[Target]) -> list[Written]:
        """Make the copies that a former archiver owed when it was killed: their pins are lifted already."""
        found = []
        for version, rank in self._todo.owed:
            holders = []
            for target in targets:
                try:
                    holders.append((target, catalog.part(target.open(), version, rank)))
                except CheckpointError:
                    continue
            if holders:
                first, part = holders[0]
                parts: dict[str, Part] = {target.label: held for target, held in holders}
                parts |= {t.label: part for t in targets if t.label not in parts and self._copy(first, t, part)}
                found.append(Written(rank=rank, version=version, world_size=part.world_size, parts=parts))
            self._todo.done(version, rank)
        return found

    def _first(
        self,
        target: Target,
        source: Source,
        rank: int,
        world_size: int,
        config: CheckpointConfig,
        basis: Basis | None,
    ) -> Part | None:
        """Write from the slot; ``None`` where the tier cannot."""

        def write() -> Part:
            return archive.write_part(
                target.admitted(),
                source,
                job=config.job,
                run=config.run,
                rank=rank,
                world_size=world_size,
                basis=basis,
                pace=target.pace,
            )

        return self._attempt(target, rank, source.version, write)

    def _copy(self, first: Target, target: Target, part: Part) -> bool:
        def copy() -> Part:
            return archive.copy_part(first.open(), target.admitted(), part, pace=target.pace)

        return self._attempt(target, part.rank, part.version, copy) is not None

    def _attempt(self, target: Target, rank: int, version: Version, call: Callable[[], Part]) -> Part | None:
        if (why := target.refusal) is not None:
            self._missed(target, rank, version, why)
            return None
        for last in (number == WRITE_TRIES - 1 for number in range(WRITE_TRIES)):
            try:
                part = call()
            except SlotInvalid:
                raise
            except MemoryError:
                self._bases.pop(rank, None)
                self._missed(target, rank, version, NotEnoughMemory(f"{target.url}: {NO_MEMORY}"))
                return None
            except CheckpointError as error:
                if isinstance(error, PayloadDamaged):
                    self._tell(Note(what="damaged", tier=target.label, step=version.step, rank=rank, why=str(error)))
                    if not last:
                        continue
                self._missed(target, rank, version, error)
                return None
            return part
        return None

    def _missed(self, target: Target, rank: int, version: Version, error: CheckpointError) -> None:
        target.missed(rank, error)
        target.last.pop(rank, None)
        self._tell(Note(what="skipped", tier=target.label, step=version.step, rank=rank, why=str(error)))

    def _hold(self, basis: Basis, source: Source, part: Part, full_every: int, took_s: float) -> None:
        """Keep the payload for the next difference while the slot still has it."""
        if full_every <= 1:
            basis.drop()
            return
        try:
            basis.take(source, part, took_s=took_s, at_s=time.monotonic())
        except (SlotInvalid, MemoryError):
            basis.drop()  # the next one is full

    def _await_seal(self, slot: Slot) -> None:
        """The keeper's checksums, made before the bytes travelled; the archiver's own when there is no keeper."""
        waited = 0.0
        while not slot.sealed and waited < SEAL_WAIT_S:
            self._sleep(SEAL_LOOK_S)
            waited += SEAL_LOOK_S
        if not slot.sealed:
            slot.seal()

    def _note(self, slot: Slot, rank: int, what: str, why: str) -> None:
        version = slot.version
        step = version.step if version else 0
        if what == "damaged":
            self._tell(Note(what="damaged", tier="memory", step=step, rank=rank, why=why))
        else:
            self._tell(Note(what="skipped", tier="memory", step=step, rank=rank, why=why))
