"""Gradient log: one record per step, from which full state and replay make the state again. Off by default.

A record holds the gradients as the optimizers took them, the hyper-parameters of that moment, and a checksum of every
tensor as the step left it. Rebuilding compares against those, so a state that is not bit for bit the one that was
trained is never put back. Buffers, random states and data position are no optimizer's work; whoever keeps a log hands
them over as ``plain``.

    gradients/000000001200.e65536/rank00003.grads
"""

from __future__ import annotations

import re
import struct
import time
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import msgspec
import torch
from msgspec import Struct
from torch import Tensor
from torch.optim import Optimizer

from keepstep.checkpoint import delta, sums
from keepstep.checkpoint.exceptions import CheckpointError, PayloadDamaged
from keepstep.checkpoint.generation import Frame
from keepstep.checkpoint.slot import Version
from keepstep.ports.tier import Tier
from keepstep.trainer.exceptions import ReplayDiffers, ReplayRefused, StateNotPlain
from keepstep.trainer.replay_check_torch import Check, self_check
from keepstep.trainer.replay_torch import Replica, Stroke, differing, state_sums, take

FORMAT = 1
PREFIX = "gradients/"
PENDING = 2
"""Steps that may wait for the tier; the next one waits with them."""
WRITE_LIMIT_S = 120.0
"""How long training waits for the oldest of them before the log is given up."""
NAMED = 4
"""Tensors that a sentence names."""

_MAGIC = 0x4B53_4752_4144_0001
_HEAD = struct.Struct("<QQQ")
_NAME = re.compile(r"^gradients/(\d{12})\.e(\d+)/rank(\d{5,})\.grads$")


class Kept(Struct, frozen=True, kw_only=True):
    """A stroke as it lies in the file: ``stored`` bytes from ``start`` behind the head, with a checksum per chunk."""

    stroke: Stroke
    start: int
    stored: int
    sums: tuple[int, ...]
    frames: tuple[Frame, ...]


class Record(Struct, frozen=True, kw_only=True):
    """What leads from one version to the next; ``after`` is the checksum of every tensor then."""

    format: int = FORMAT
    rank: int
    base: Version
    version: Version
    strokes: tuple[Kept, ...]
    after: dict[str, int]
    plain: bytes = b""


class Rebuilt(NamedTuple):
    """What ``rebuild`` reached, and the plain state that came with it (empty where no step was replayed)."""

    version: Version
    steps: int
    plain: bytes


def record_name(version: Version, rank: int) -> str:
    """Name of a record's object."""
    return f"{PREFIX}{version.step:012d}.e{version.epoch}/rank{rank:05d}.grads"


class GradientLog:
    """Keeps a record of each step of these optimizers in a tier.

    ``start`` with a version of which a full state is kept, ``commit`` after each step, ``close`` at the end. When a
    step cannot be replayed the log ends with a sentence in ``broken``, and training goes on: ``start`` again at the
    next full state.

    Args:
        optimizers: by the name under which they are registered.
        tier: where records go.
    """

    def __init__(self, optimizers: Mapping[str, Optimizer], tier: Tier, *, rank: int = 0) -> None:
        self._optimizers, self._tier, self._rank = dict(optimizers), tier, rank
        self._names = {id(optimizer): name for name, optimizer in self._optimizers.items()}
        self._hooks: list[Any] = []
        self._at: Version | None = None
        self._after: dict[str, int] = {}
        self._taken: list[tuple[Stroke, Tensor]] = []
        self._free: list[Tensor] = []
        self._pool: ThreadPoolExecutor | None = None
        self._pending: deque[Future[None]] = deque()
        self.broken = ""
        """Why no further step is kept; empty while all is well."""
        self.steps = self.payload = self.stored = 0
        """Records written, bytes of their gradients, and bytes that went to the tier."""
        self.stall_s = 0.0
        """Seconds that training has spent here: checksums, copies of gradients, waiting for the tier."""

    def start(self, version: Version) -> Check:
        """Begin behind a version whose full state is kept elsewhere; nothing is kept where replay is not exact."""
        self.close()
        check = self_check(self._optimizers)
        self.broken = "" if check.exact else check.reason
        if check.exact:
            self._at, self._after = version, state_sums(self._optimizers)
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="keepstep-gradients")
            self._hooks = [o.register_step_pre_hook(self._before_step) for o in self._optimizers.values()]
        return check

    def commit(self, version: Version, plain: bytes = b"") -> None:
        """The steps since the last commit led to this version."""
        if self.broken or self._pool is None or self._at is None:
            return
        began = time.perf_counter()
        self._after = state_sums(self._optimizers)
        taken, self._taken = self._taken, []
        try:
            while len(self._pending) >= PENDING:
                self._pending.popleft().result(timeout=WRITE_LIMIT_S)
        except TimeoutError:
            self._end(f"{self._tier.where} took more than {WRITE_LIMIT_S:.0f} s for a step's gradients")
            return
        self._pending.append(self._pool.submit(self._write, self._at, version, taken, self._after, plain))
        self._at = version
        self.stall_s += time.perf_counter() - began

    def flush(self) -> str:
        """Wait until everything committed is durable; the reason where it is not."""
        while self._pending:
            self._pending.popleft().result()
        return self.broken

    def close(self) -> None:
        """Take the hooks off and wait for the tier."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self.flush()
        if self._pool is not None:
            self._pool.shutdown()
        self._pool, self._at, self._taken = None, None, []

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.broken:
            return
        began = time.perf_counter()
        name = self._names[id(optimizer)]
        if any(callable(value) for value in (*args[1:], *kwargs.values())):
            self._end(f"optimizer {name!r} was stepped with a closure, whose gradients are not known before")
            return
        if not self._taken and (changed := differing(state_sums(self._optimizers), self._after)):
            self._end(f"{_some(changed)} changed since the last commit by something else than an optimizer's step")
            return
        try:
            self._taken.append(take(name, optimizer, self._buffer))
        except (ReplayRefused, StateNotPlain) as error:
            self._end(str(error))
        self.stall_s += time.perf_counter() - began

    def _end(self, reason: str) -> None:
        self.broken, self._taken = self.broken or reason, []

    def _buffer(self, size: int) -> Tensor:
        """Memory that an earlier step has touched already, where there is some."""
        for index, held in enumerate(self._free):
            if len(held) >= size:
                return self._free.pop(index)
        return torch.empty(size, dtype=torch.uint8)

    def _write(
        self, base: Version, version: Version, taken: list[tuple[Stroke, Tensor]], after: dict[str, int], plain: bytes
    ) -> None:
        if self.broken:
            return
        kept: list[Kept] = []
        body: list[bytes] = []
        at = 0
        try:
            for stroke, held in taken:
                pairs = list(delta.encode(held[: stroke.payload].numpy().data, None, stroke.entries, workers=1))
                stored = b"".join(data for _, data in pairs)
                table = tuple(sums.table(memoryview(stored)))
                frames = tuple(frame for frame, _ in pairs)
                kept.append(Kept(stroke=stroke, start=at, stored=len(stored), sums=table, frames=frames))
                body.append(stored)
                at += len(stored)
                self.payload += stroke.payload
                self._free.append(held)
            record = Record(rank=self._rank, base=base, version=version, strokes=tuple(kept), after=after, plain=plain)
            head = msgspec.msgpack.encode(record)
            front = _HEAD.pack(_MAGIC, len(head), sums.digest(head)) + head
            self.stored += self._tier.put(record_name(version, self._rank), [front, *body])
            self.steps += 1
        except CheckpointError as error:
            self._end(f"the gradients of step {version.step} could not be kept: {error}")


# ---------------------------------------------------------------- reading


def read_record(tier: Tier, name: str) -> tuple[Record, list[bytearray]]:
    """A record and the gradients of each of its strokes, verified.

    Raises:
        PayloadDamaged: the object is not what was written.
        TierError: it could not be read.
    """
    data = memoryview(tier.get(name))
    if len(data) < _HEAD.size:
        raise PayloadDamaged(f"{tier.where}/{name}: cut short")
    magic, length, digest = _HEAD.unpack_from(data)
    head, body = data[_HEAD.size : _HEAD.size + length], data[_HEAD.size + length :]
    if magic != _MAGIC or len(head) != length or sums.digest(head) != digest:
        raise PayloadDamaged(f"{tier.where}/{name}: its head does not match its checksum")
    try:
        record = msgspec.msgpack.decode(head, type=Record)
    except msgspec.DecodeError as error:
        raise PayloadDamaged(f"{tier.where}/{name}: not readable by this keepstep: {error}") from error
    payloads: list[bytearray] = []
    for kept in record.strokes:
        stored = body[kept.start : kept.start + kept.stored]
        if sums.damaged(stored, list(kept.sums)):
            raise PayloadDamaged(f"{tier.where}/{name}: gradients of {kept.stroke.optimizer!r} are damaged")
        payloads.append(bytearray(kept.stroke.payload))
        delta.decode(kept.frames, stored, None, memoryview(payloads[-1]))
    if len(body) != sum(kept.stored for kept in record.strokes):
        raise PayloadDamaged(f"{tier.where}/{name}: {len(body)} bytes behind its head, not what it says")
    return record, payloads


def records(tier: Tier, rank: int) -> Iterator[tuple[Version, str]]:
    """Versions that a rank's records lead to, by step; of one step the newest epoch first."""
    found = [
        (Version(int(m[1]), int(m[2])), m[0]) for m in map(_NAME.match, tier.names(PREFIX)) if m and int(m[3]) == rank
    ]
    yield from sorted(found, key=lambda pair: (pair[0].step, -pair[0].epoch))


def rebuild(
    tier: Tier, optimizers: Mapping[str, Optimizer], base: Version, *, rank: int = 0, upto: Version | None = None
) -> Rebuilt:
    """Lead optimizers that hold the full state of ``base`` to a later version, on a replica, and put that back.

    Args:
        upto: where to end; the last version that the records reach where left out.

    Raises:
        ReplayRefused: the records do not lead there, or were kept with another implementation.
        ReplayDiffers: a step did not come out as it was.
        PayloadDamaged: a record is not what was written.
    """
    replica = Replica(optimizers)
    at, steps, plain = base, 0, b""
    for version, name in records(tier, rank):
        if at == upto:
            break
        if version.step <= at.step or (upto is not None and version.step > upto.step):
            continue
        record, payloads = read_record(tier, name)
        if record.base != at:
            continue
        for kept, payload in zip(record.strokes, payloads, strict=True):
            replica.apply(kept.stroke, memoryview(payload))
        if wrong := differing(state_sums(replica.optimizers), record.after):
            raise ReplayDiffers(
                f"step {version.step} replayed on rank {rank}: {_some(wrong)} came out otherwise than when it was "
                f"trained; resume from the full generation of step {base.step}"
            )
        at, steps, plain = record.version, steps + 1, record.plain
    if upto is not None and at != upto:
        raise ReplayRefused(
            f"records of rank {rank} lead from step {base.step} to step {at.step}, not to {upto.step}; resume from "
            f"step {at.step} or from a full generation"
        )
    replica.put_back(optimizers)
    return Rebuilt(at, steps, plain)


def forget(tier: Tier, upto: Version, *, rank: int = 0) -> int:
    """Remove records that a full state of ``upto`` makes needless; how many went."""
    names = [name for version, name in records(tier, rank) if version.step <= upto.step]
    for name in names:
        tier.remove(name)
    return len(names)


def _some(names: list[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more
