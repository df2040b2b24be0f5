"""Finisher: makes generations exist when the last part has come, and removes what retention lets go.

The node that holds rank 0 does this for the shared tier, by looking there: nobody has to be asked, nobody can be
missed. What it had not finished when it died, its successor finds by looking.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Sequence

from msgspec import Struct

from keepstep.checkpoint import archive, catalog, collect
from keepstep.checkpoint.config import CheckpointConfig
from keepstep.checkpoint.exceptions import (
    BaseDamaged,
    CheckpointError,
    GenerationIncomplete,
    ManifestDamaged,
    PayloadDamaged,
    TierError,
)
from keepstep.checkpoint.generation import Manifest
from keepstep.checkpoint.notes import Note
from keepstep.checkpoint.room import show
from keepstep.checkpoint.slot import Version
from keepstep.checkpoint.target import Say, Target

COMPLETE_S = 900.0
"""How long a generation may wait for the parts of other nodes before it is said to be skipped."""
LOOK_FIRST_S, LOOK_LAST_S = 0.2, 5.0
"""Pauses between looks for other nodes' parts; each is half as long again as the one before."""


class _Pending(Struct, kw_only=True):
    version: Version
    world_size: int
    since: float
    next_look: float
    pause: float = LOOK_FIRST_S
    asked: bool = True
    """False for what a run long ago left: looked at once, and not worth a note."""


class _Tried(Struct, frozen=True, kw_only=True):
    """Ranks of this node whose part of a generation could not be written, or is whole."""

    failed: set[int]
    whole: set[int]


class Finisher:
    """Pending generations of the shared tier."""

    def __init__(
        self,
        tell: Callable[[Note], None],
        say: Say,
        *,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], int] = time.time_ns,
    ) -> None:
        self._tell, self._say, self._clock, self._now = tell, say, clock, now
        self._pending: dict[Version, _Pending] = {}
        self._scanned = False
        self._newest: Version | None = None
        """Newest complete generation of the shared tier that is known here."""
        self._tried: dict[Version, _Tried] = {}
        """Of the newest version, and of newer ones that came before it."""

    @property
    def pending(self) -> Collection[Version]:
        """Generations that wait for other nodes' parts."""
        return self._pending.keys()

    @property
    def awaited(self) -> bool:
        """Whether the end of the job waits for a generation: not for one that a newer complete one has overtaken.

        Nodes write in order, so the parts of such a one would be there by now. Mostly an earlier run has left it, which
        was killed while it wrote.
        """
        return any(self._newest is None or version > self._newest for version in self._pending)

    @property
    def wait_s(self) -> float | None:
        """Until the next look; ``None`` when nothing is pending."""
        if not self._pending:
            return None
        return max(0.0, min(p.next_look for p in self._pending.values()) - self._clock())

    def expect(self, version: Version, world_size: int, *, asked: bool = True, took_s: float = 0.0) -> None:
        """This generation's rank 0 is written, which took so long; the rest is awaited."""
        if version in self._tried and self._tried[version].failed:
            return
        now = self._clock()
        self._pending.setdefault(
            version, _Pending(version=version, world_size=world_size, since=now - took_s, next_look=now, asked=asked)
        )

    def tried(self, target: Target, version: Version, *, failed: set[int], whole: set[int]) -> None:
        """Parts of this node were tried: with one that could not be written there will be no generation.

        It is not waited for, and the halves that this archiver has written are removed: on a full disk they would take
        the next one's place.
        """
        mine = self._tried.get(version, _Tried(failed=set(), whole=set()))
        mine = _Tried(failed=(mine.failed | failed) - whole, whole=(mine.whole | whole) - failed)
        self._tried = {known: old for known, old in self._tried.items() if known > version} | {version: mine}
        if not mine.failed:
            return
        self._pending.pop(version, None)
        with contextlib.suppress(CheckpointError):
            tier = target.admitted()
            if not catalog.look(tier, version).complete:
                collect.remove_parts(tier, version, mine.whole)
        for rank in mine.whole:
            if target.last.get(rank) == version:
                del target.last[rank]

    @property
    def scanned(self) -> bool:
        return self._scanned

    def scan(self, target: Target) -> None:
        """Once per process: take up what an earlier archiver of rank 0 had not finished."""
        if self._scanned:
            return
        tier = target.admitted()
        found = catalog.read(tier)
        newest = catalog.newest(found)
        if newest is not None:
            self._completed(newest.version)
        for generation in found:
            if generation.complete or generation.damaged or 0 not in generation.ranks:
                continue
            if newest is None or generation.version > newest.version:
                try:
                    part = catalog.part(tier, generation.version, 0)
                except (GenerationIncomplete, ManifestDamaged):
                    continue
                recent = abs(self._now() - part.written_ns) < COMPLETE_S * 1e9
                self.expect(generation.version, part.world_size, asked=recent)
        self._scanned = True

    def look(self, target: Target, config: CheckpointConfig, writing: Collection[Version]) -> None:
        """Complete what is due for a look. Never raises for a tier's troubles."""
        now = self._clock()
        for pending in sorted(self._pending.values(), key=lambda p: p.version):
            if pending.next_look > now:
                continue
            try:
                known = catalog.look(target.open(), pending.version).verified
                manifest = archive.complete(target.admitted(), pending.version, pending.world_size)
            except TierError as error:
                target.failed(error)
                self._later(pending, target, error)
            except (GenerationIncomplete, ManifestDamaged, PayloadDamaged) as error:
                # Another history's part may lie there until its rank's new one comes: that is waiting, too.
                self._later(pending, target, error)
            else:
                del self._pending[pending.version]
                self._completed(pending.version)
                target.worked(pending.version)
                if not known:  # else it was pinned once more after a recovery
                    self._saved(target, manifest, self._clock() - pending.since)
                self.tidy(target, config, writing)

    def _completed(self, version: Version) -> None:
        self._newest = version if self._newest is None else max(self._newest, version)

    def _later(self, pending: _Pending, target: Target, error: CheckpointError) -> None:
        now = self._clock()
        limit = COMPLETE_S if pending.asked and not isinstance(error, BaseDamaged) else 0.0
        if now - pending.since < limit:
            pending.next_look, pending.pause = now + pending.pause, min(LOOK_LAST_S, pending.pause * 1.5)
            return
        del self._pending[pending.version]
        if not pending.asked:
            return
        step = pending.version.step
        self._say(f"step {step} is given up in {target.url} after {limit:g} s: {error}")
        self._tell(Note(what="skipped", tier=target.label, step=step, why=str(error)))

    def _saved(self, target: Target, manifest: Manifest, seconds: float) -> None:
        step, size = manifest.version.step, sum(ref.bytes for ref in manifest.parts)
        kind = "what changed" if manifest.bases else "everything"
        self._say(f"step {step} is durable and verified in {target.url}: {show(size)}, {kind}, {seconds:.1f} s")
        self._tell(Note(what="saved", tier=target.label, step=step, bytes=size, seconds=seconds))
        self._tell(Note(what="verified", tier=target.label, step=step, bytes=size))

    def tidy(self, target: Target, config: CheckpointConfig, writing: Collection[Version]) -> None:
        """Remove what retention lets go. Never raises for a tier's troubles."""
        busy = [*writing, *self._pending]
        try:
            done = collect.collect(target.admitted(), config.policy, writing=busy, by_itself=target.by_itself)
        except CheckpointError as error:
            target.kept(error)
            return
        if done.removed:
            target.removed(done.removed[-1].version)
        for verdict in done.removed:
            self._tell(Note(what="expired", tier=target.label, step=verdict.version.step, why=verdict.why))
        if done.removed:
            steps = ", ".join(str(verdict.version.step) for verdict in done.removed)
            self._say(f"removed from {target.url}: step {steps}")

    def settle_alone(
        self, target: Target, config: CheckpointConfig, version: Version, sizes: Sequence[int], world_size: int
    ) -> None:
        """A node's own tier: its parts are whole, and count by themselves; a manifest only where all ranks are here."""
        self._tell(Note(what="saved", tier=target.label, step=version.step, bytes=sum(sizes)))
        self._say(f"step {version.step} is durable in {target.url}: {show(sum(sizes))} of this node's ranks")
        try:
            archive.complete(target.admitted(), version, world_size)
            self._tell(Note(what="verified", tier=target.label, step=version.step, bytes=sum(sizes)))
        except (GenerationIncomplete, ManifestDamaged, PayloadDamaged):
            target.worked(version)  # the other ranks' parts are on other nodes
        except TierError as error:
            target.failed(error)
        else:
            target.worked(version)
        self.tidy(target, config, [version])
