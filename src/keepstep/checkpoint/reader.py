"""Reader: bytes of a generation, verified, from whichever tier has them whole.

Only what is asked for is read, in stretches of whole checksummed chunks. A delta is resolved for the same stretch down
its chain, in one buffer. A copy that is damaged, cut short or out of reach is put aside and the next tier's is read;
what happened is told once per copy.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import msgspec

from keepstep.checkpoint import delta, generation, reshard, sums
from keepstep.checkpoint.exceptions import (
    CheckpointError,
    GenerationIncomplete,
    ManifestDamaged,
    PayloadDamaged,
    TierAway,
    TierError,
    TierMissing,
)
from keepstep.checkpoint.generation import Frame, Manifest, Part, PartRef
from keepstep.checkpoint.slot import Version
from keepstep.ports.tier import Tier

WORKERS = 8
"""Stretches that are read at the same time from a disk."""
REMOTE_WORKERS = 16
"""The same from an object store, where waiting takes longer than carrying."""
MAX_CHAIN = 1000
"""Deltas that may rest on each other; a longer chain is taken for a circle."""


class Damage(NamedTuple):
    """A copy that could not be used. ``tier`` is its label, ``where`` what people call it."""

    tier: str
    where: str
    name: str
    why: str


class _Held:
    """One tier's copy of one part."""

    def __init__(self, tier: Tier, part: Part) -> None:
        self.tier, self.part = tier, part
        self.name = f"{generation.folder(part.version)}/{part.file}"
        self.path = tier.path(self.name)
        self.bad = False
        self.starts = [frame.start for frame in part.frames]

    def read_into(self, start: int, out: memoryview) -> None:
        """Bytes of the payload's file. Raises ``PayloadDamaged`` where it is shorter than that."""
        if self.path is None:
            data = self.tier.get(self.name, start, len(out))
            if len(data) != len(out):
                raise PayloadDamaged(f"{self.name}: {len(data)} bytes came where {len(out)} were asked for")
            out[:] = data
            return
        # Not mapped: a file that is cut short, or a mount that goes away, would end the process with SIGBUS.
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise TierMissing(f"{self.path} is not there any more") from error
        except OSError as error:
            raise TierAway(f"{self.path} cannot be opened: {error.strerror}") from error
        try:
            at = 0
            while at < len(out):
                got = os.preadv(fd, [out[at:]], start + at)
                if not got:
                    raise PayloadDamaged(f"{self.path}: ends at byte {start + at}, {self.part.size} are described")
                at += got
        except OSError as error:
            raise TierAway(f"{self.path} cannot be read: {error.strerror}") from error
        finally:
            os.close(fd)


class Reader:
    """One generation over several tiers.

    Args:
        tiers: the fastest first.
        told: hears of each copy that could not be used; may be called from any thread.
        history: job and run of the parts that are meant; another run may have reached the same version.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        version: Version,
        *,
        told: Callable[[Damage], None] | None = None,
        history: tuple[str, str] | None = None,
        depth: int = 0,
    ) -> None:
        self.version = version
        self._history = history
        self._tiers, self._told, self._depth = tuple(tiers), told, depth
        self._lock = threading.RLock()
        self._refs: dict[int, dict[int, PartRef] | None] = {}
        self._held: dict[int, list[_Held]] = {}
        self._tried: dict[int, int] = {}
        self._why: dict[int, list[str]] = {}
        self._bases: dict[Version, Reader] = {}
        self._scratch = threading.local()
        self.from_tier: dict[str, int] = {}
        """Bytes of payload by the label of the tier that they came from."""

    # ---------------------------------------------------------------- descriptions

    def manifest(self) -> Manifest:
        """The generation's table of contents, from the first tier that has a sound one.

        Raises:
            GenerationIncomplete: no tier has one.
            ManifestDamaged: none that is there can be trusted.
        """
        name, damage = generation.manifest_name(self.version), None
        for tier in self._tiers:
            try:
                found = generation.unseal(tier.get(name), Manifest, f"{tier.where}/{name}")
            except TierMissing:
                continue
            except (ManifestDamaged, TierError) as error:
                damage = damage or error
                self._tell(tier, name, error)
                continue
            if found.version == self.version:
                return found
            damage = ManifestDamaged(f"{tier.where}/{name}: speaks of another step ({found.version.step})")
        if damage is not None:
            raise damage
        where = " or ".join(tier.where for tier in self._tiers)
        raise GenerationIncomplete(
            f"step {self.version.step} is not complete in {where}: there is no {generation.MANIFEST}"
        )

    def part(self, rank: int) -> Part:
        """What a rank wrote, from the fastest tier that has it whole.

        Raises:
            GenerationIncomplete: no tier has it.
            PayloadDamaged: none of those that have it can be used.
        """
        return next(self._copies(rank)).part

    def _copies(self, rank: int) -> Iterator[_Held]:
        """Copies that are not known to be bad; at least one, or an error that says why there is none."""
        seen, number = 0, 0
        while True:
            with self._lock:
                held = self._held.setdefault(rank, [])
                if number >= len(held) and not self._look_further(rank):
                    break
                one = held[number] if number < len(held) else None
            if one is not None:
                number += 1
                if not one.bad:
                    seen += 1
                    yield one
        if seen:
            return
        reasons = self._why.get(rank, [])
        where = " or ".join(tier.where for tier in self._tiers)
        if reasons:
            raise PayloadDamaged(f"step {self.version.step}, rank {rank}: no usable copy: " + "; ".join(reasons))
        raise GenerationIncomplete(f"step {self.version.step}: rank {rank}'s part is not in {where}")

    def _look_further(self, rank: int) -> bool:
        """Load the description of the next tier's copy; false when all tiers have been asked."""
        number = self._tried.get(rank, 0)
        if number >= len(self._tiers):
            return False
        self._tried[rank] = number + 1
        tier, name = self._tiers[number], generation.part_name(self.version, rank)
        try:
            refs = self._manifest_of(number)
            data = tier.get(name)
            if refs is not None and (rank not in refs or refs[rank].sum != sums.digest(data)):
                raise ManifestDamaged(f"{tier.where}/{name}: is not what the manifest names")
            part = generation.unseal(data, Part, f"{tier.where}/{name}")
            if part.version != self.version or part.rank != rank:
                raise ManifestDamaged(f"{tier.where}/{name}: speaks of step {part.version.step}, rank {part.rank}")
            held = self._held[rank]
            if self._history is not None and part.history != self._history:
                raise ManifestDamaged(f"{tier.where}/{name}: is of another run: {' '.join(part.history)}")
            if held and held[0].part.tensors != part.tensors:
                raise ManifestDamaged(f"{tier.where}/{name}: lays its tensors out otherwise than {held[0].tier.where}")
            held.append(_Held(tier, part))
        except TierMissing:
            pass
        except (ManifestDamaged, TierError) as error:
            self._why.setdefault(rank, []).append(str(error))
            self._tell(tier, name, error)
        return True

    def _manifest_of(self, number: int) -> dict[int, PartRef] | None:
        """Parts as this tier's manifest names them; ``None`` where it has none (a node's own disk)."""
        if number not in self._refs:
            tier, name = self._tiers[number], generation.manifest_name(self.version)
            try:
                found = generation.unseal(tier.get(name), Manifest, f"{tier.where}/{name}")
                self._refs[number] = {ref.rank: ref for ref in found.parts}
            except (TierMissing, ManifestDamaged):
                self._refs[number] = None  # the part bears its own checksum, too
        return self._refs[number]

    def _tell(self, tier: Tier, name: str, error: Exception) -> None:
        if self._told is not None:
            self._told(Damage(tier.label, tier.where, name, str(error)))

    # ---------------------------------------------------------------- bytes

    def fill(
        self, reads: Sequence[reshard.Read], target: memoryview, progress: Callable[[int], None] | None = None
    ) -> None:
        """Carry out a plan of ``reshard``: many stretches at once, each verified before a byte of it is handed out.

        Raises:
            PayloadDamaged: a stretch is whole in no tier; part of ``target`` may have been written.
            GenerationIncomplete: a part is in no tier.
        """

        def one(read: reshard.Read) -> None:
            stretch = self.stretch(read.rank, read.start, read.end)
            for block in read.blocks:
                reshard.copy(block, stretch, read.start, target)
            if progress is not None:
                progress(sum(block.nbytes for block in read.blocks))

        workers = min(self._workers(), len(reads))
        if workers <= 1:
            for read in reads:
                one(read)
            return
        with ThreadPoolExecutor(workers, "restore") as pool:
            futures = [pool.submit(one, read) for read in reads]
            try:
                for future in futures:
                    future.result()
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise

    def stretch(self, rank: int, start: int, end: int) -> memoryview:
        """Verified bytes of a part's payload; the memory is used again by this thread's next call."""
        for held in self._copies(rank):
            try:
                view = self._read(held, start, end)
            except (CheckpointError, msgspec.MsgspecError) as error:
                self._put_aside(held, rank, error)
                continue
            with self._lock:
                self.from_tier[held.tier.label] = self.from_tier.get(held.tier.label, 0) + end - start
            return view
        raise PayloadDamaged(f"step {self.version.step}, rank {rank}: " + "; ".join(self._why.get(rank, [])))

    def _put_aside(self, held: _Held, rank: int, error: Exception) -> None:
        with self._lock:
            if held.bad:
                return
            held.bad = True
            self._why.setdefault(rank, []).append(f"{held.tier.where}: {error}")
        self._tell(held.tier, held.name, error)

    def _read(self, held: _Held, start: int, end: int) -> memoryview:
        part = held.part
        if not 0 <= start <= end <= part.payload:
            raise PayloadDamaged(f"{held.name}: payload bytes {start} to {end} of {part.payload} do not exist")
        if start == end:
            return memoryview(bytearray())
        low = start // sums.CHUNK * sums.CHUNK
        high = min(-(-end // sums.CHUNK) * sums.CHUNK, part.payload)
        if part.kind == "full":
            buffer = self._buffer("payload", high - low)
            held.read_into(part.header + low, buffer)
        else:
            buffer, low, high = self._resolve(held, low, high)
        for number in range(start // sums.CHUNK, -(-end // sums.CHUNK)):
            first, last = number * sums.CHUNK, min((number + 1) * sums.CHUNK, part.payload)
            if number >= len(part.payload_sums) or (
                sums.digest(buffer[first - low : last - low]) != part.payload_sums[number]
            ):
                raise PayloadDamaged(f"{held.name}: bytes {first} to {last} of the payload do not match their checksum")
        return buffer[start - low : end - low]

    def _resolve(self, held: _Held, low: int, high: int) -> tuple[memoryview, int, int]:
        """The stretch of a delta, wide enough for whole frames, decoded onto its base in the base's buffer."""
        part = held.part
        first = max(0, bisect_right(held.starts, low) - 1)
        last = bisect_right(held.starts, high - 1)
        frames = part.frames[first:last]
        if not frames:
            raise PayloadDamaged(f"{held.name}: no frame covers payload bytes {low} to {high}")
        low, high = min(low, frames[0].start), max(high, frames[-1].start + frames[-1].nbytes)
        if low != frames[0].start or high != frames[-1].start + frames[-1].nbytes or high > part.payload:
            raise PayloadDamaged(f"{held.name}: its frames do not cover payload bytes {low} to {high}")
        if part.base is None:
            buffer = self._buffer("payload", high - low)
        else:
            base = self._base(part.base)
            view = base.stretch(part.rank, low, high)
            buffer = self._buffer("payload", high - low)
            buffer[:] = view
        file, shift = self._stored(held, frames)
        moved = [Frame(f.start - low, f.nbytes, f.offset - shift, f.stored, f.codec) for f in frames]
        delta.decode(moved, file, None if part.base is None else buffer, buffer, workers=1)
        return buffer, low, high

    def _stored(self, held: _Held, frames: Sequence[Frame]) -> tuple[memoryview, int]:
        """The verified bytes of the file in which these frames lie, and where in the file they begin."""
        part = held.part
        begin = min((f.offset for f in frames if f.stored), default=0)
        end = max((f.offset + f.stored for f in frames if f.stored), default=0)
        if begin < 0 or end > part.size:
            raise PayloadDamaged(f"{held.name}: frames up to byte {end} of a file of {part.size}")
        low = begin // sums.CHUNK * sums.CHUNK
        high = min(-(-end // sums.CHUNK) * sums.CHUNK, part.size)
        buffer = self._buffer("file", high - low)
        if high > low:
            held.read_into(low, buffer)
        for number in range(low // sums.CHUNK, -(-high // sums.CHUNK)):
            first, last = number * sums.CHUNK, min((number + 1) * sums.CHUNK, part.size)
            if number >= len(part.sums) or sums.digest(buffer[first - low : last - low]) != part.sums[number]:
                raise PayloadDamaged(f"{held.name}: bytes {first} to {last} do not match their checksum")
        return buffer, low

    def _base(self, version: Version) -> Reader:
        if version >= self.version or self._depth >= MAX_CHAIN:
            raise PayloadDamaged(
                f"step {self.version.step} claims to rest on step {version.step}, which is not before it"
            )
        with self._lock:
            if version not in self._bases:
                self._bases[version] = Reader(self._tiers, version, told=self._told, depth=self._depth + 1)
            return self._bases[version]

    def _buffer(self, name: str, size: int) -> memoryview:
        """This thread's memory for one purpose: page faults of fresh memory would cost more than the reading."""
        held = getattr(self._scratch, name, None)
        if held is None or len(held) < size:
            held = bytearray(size)
            setattr(self._scratch, name, held)
        return memoryview(held)[:size]

    def _workers(self) -> int:
        remote = all(tier.path(generation.MANIFEST) is None for tier in self._tiers)
        return REMOTE_WORKERS if remote else min(WORKERS, 2 * (os.cpu_count() or 1))
