"""Frames: what crosses a socket. Four bytes of big-endian length, then one msgpack value.

Three conversations use them: agent and controller, worker and agent (Unix socket in the node directory), and agent
and agent (only while no controller answers).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, Generic, Literal, TypeVar

import msgspec
from msgspec import Struct

from keepstep.model.actions import AnyAction
from keepstep.model.facts import AnyFact, UserError, WorkerExited, WorkerFrozen
from keepstep.model.ids import Epoch, JobId, NodeId, Rank, SlotId
from keepstep.model.position import GroupPosition
from keepstep.model.topology import JobSpec, Roster

PROTOCOL = 1
"""Version of all frames. Two parties with different numbers refuse each other with a sentence, never silently."""

MAX_FRAME = 16 * 1024 * 1024
"""Bytes; a longer frame is a protocol error, not a reason to allocate."""

_LENGTH = struct.Struct(">I")


class FrameError(ValueError):
    """A peer sent something that is not a frame of this protocol."""


class Frame(Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Base of all frames."""


# ---------------------------------------------------------------- agent -> controller


class AgentHello(Frame, frozen=True, kw_only=True):
    """First frame of a connection. The agent's ``AgentJoined`` fact follows in ``Reports``, then what it kept."""

    protocol: int
    version: str
    job: JobId
    node: NodeId
    boot: str
    spec: JobSpec
    token: str = ""


class Reports(Frame, frozen=True, kw_only=True):
    """Facts in the order of their ``seq``. An empty list renews the lease: it is the heartbeat."""

    facts: tuple[AnyFact, ...] = ()


# ---------------------------------------------------------------- controller -> agent


class Welcome(Frame, frozen=True, kw_only=True):
    """The agent is in. ``acked`` is the newest report number of this node that is durable."""

    version: str
    acked: int
    lease_s: float
    heartbeat_s: float
    pace_window_s: float = 0.0
    """Length of one window of step times; 0 where none are measured."""


class Refused(Frame, frozen=True, kw_only=True):
    """The agent (or worker) is not let in, and why; trying again without a change is pointless."""

    why: str
    code: int


class Acked(Frame, frozen=True, kw_only=True):
    """Reports up to this number are durable and may be forgotten."""

    seq: int


class Orders(Frame, frozen=True, kw_only=True):
    actions: tuple[AnyAction, ...]


# ---------------------------------------------------------------- worker -> agent


class WorkerHello(Frame, frozen=True, kw_only=True):
    """Sent on connect and again after the agent's restart. ``roster_epoch`` 0: not yet seated."""

    protocol: int
    version: str
    slot: SlotId
    pid: int
    epoch: Epoch = Epoch(0)


class WorkerBroken(Frame, frozen=True, kw_only=True):
    epoch: Epoch
    step: int
    error: str


class WorkerJoined(Frame, frozen=True, kw_only=True):
    epoch: Epoch
    ms: float


class WorkerResumed(Frame, frozen=True, kw_only=True):
    epoch: Epoch
    step: int
    newest: int
    source: str
    phases: dict[str, float]


class WorkerAdvanced(Frame, frozen=True, kw_only=True):
    epoch: Epoch
    step: int


class WorkerDone(Frame, frozen=True, kw_only=True):
    epoch: Epoch
    step: int


class WorkerGuarded(Frame, frozen=True, kw_only=True):
    """As ``GuardNoted``, which the agent makes of it. Without an epoch: it is said once, not again to a new agent."""

    what: Literal[
        "nonfinite", "spike", "replicas", "rolled_back", "skipped", "gone", "kept", "alone", "judged", "quarantined"
    ]
    step: int
    why: str
    ranks: tuple[Rank, ...] = ()
    tensor: str = ""
    since: int | None = None
    verdict: Literal["", "data", "software", "transient", "hardware"] = ""
    batches: tuple[str, ...] = ()
    others: tuple[Rank, ...] = ()


class WorkerPositions(Frame, frozen=True, kw_only=True):
    """The answer to ``ShowPositions``."""

    request: int
    groups: tuple[GroupPosition, ...]


class WorkerFailed(Frame, frozen=True, kw_only=True):
    """An exception is leaving the user's code; the process will exit."""

    error: UserError


class WorkerCannotResume(Frame, frozen=True, kw_only=True):
    epoch: Epoch
    why: str


# ---------------------------------------------------------------- agent -> worker


class TakeSeat(Frame, frozen=True, kw_only=True):
    """Enter the roster's epoch as ``rank``. For a survivor: abort every collective of an older epoch first."""

    roster: Roster
    rank: Rank


class RaiseInjected(Frame, frozen=True, kw_only=True):
    """Raise ``InjectedFault`` in the next step (chaos test)."""


class ShowPositions(Frame, frozen=True, kw_only=True):
    """Say where the groups stand by torch's own recorder: to ranks whose flight memory is empty (CUDA)."""

    request: int


class SlowDown(Frame, frozen=True, kw_only=True):
    """Sleep for ``seconds`` within the next step (chaos test)."""

    seconds: float


# ---------------------------------------------------------------- agent <-> agent (no controller)


class PeerFault(Frame, frozen=True, kw_only=True):
    """To the deputy: a process of mine is gone and the controller does not answer; I offer this slot instead."""

    job: JobId
    node: NodeId
    token: str
    epoch: Epoch
    cause: WorkerExited | WorkerFrozen
    offer: SlotId


class PeerJoin(Frame, frozen=True, kw_only=True):
    """From the deputy: enter this roster. Same meaning as the controller's Join."""

    token: str
    roster: Roster
    cause: WorkerExited | WorkerFrozen


class PeerAnswer(Frame, frozen=True, kw_only=True):
    ok: bool
    why: str = ""
    epoch: Epoch = Epoch(0)


AgentToController = AgentHello | Reports
ControllerToAgent = Welcome | Refused | Acked | Orders
WorkerToAgent = (
    WorkerHello
    | WorkerBroken
    | WorkerJoined
    | WorkerResumed
    | WorkerAdvanced
    | WorkerDone
    | WorkerGuarded
    | WorkerPositions
    | WorkerFailed
    | WorkerCannotResume
)
AgentToWorker = TakeSeat | ShowPositions | RaiseInjected | SlowDown | Refused
PeerToPeer = PeerFault | PeerJoin | PeerAnswer

_encode = msgspec.msgpack.Encoder().encode

T = TypeVar("T")


def pack(frame: Frame) -> bytes:
    """One frame, ready to be sent."""
    body = _encode(frame)
    if len(body) > MAX_FRAME:
        raise FrameError(f"frame of {len(body)} bytes is above the limit of {MAX_FRAME}")
    return _LENGTH.pack(len(body)) + body


class Unpacker(Generic[T]):
    """Cuts a byte stream into frames of one conversation.

    Args:
        union: the frames this side may receive, e.g. ``WorkerToAgent``.
    """

    def __init__(self, union: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(union)
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[T]:
        """Yield each frame that ``data`` completes.

        Raises:
            FrameError: the peer does not speak this protocol.
        """
        self._buffer += data
        while len(self._buffer) >= 4:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > MAX_FRAME:
                raise FrameError(f"frame of {length} bytes is above the limit of {MAX_FRAME}; not a keepstep peer?")
            if len(self._buffer) < 4 + length:
                return
            body = bytes(self._buffer[4 : 4 + length])
            del self._buffer[: 4 + length]
            try:
                yield self._decoder.decode(body)
            except msgspec.DecodeError as error:
                raise FrameError(f"unreadable frame: {error}; is the peer of another version?") from error
