"""What all facts share, and what several of them carry."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from keepstep.model.ids import Epoch, JobId, Nanos, NodeId, Rank, SlotId


class Fact(Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Base of all facts.

    Attributes:
        at: when it happened, by the observer's clock.
        node: the observing node; empty for the controller's own facts and for people.
        seq: the agent's report number, from 1, never reused by a node within a job; 0 for the controller's own facts.
            The mind ignores a report whose number it has already folded, so re-sending is harmless.
    """

    job: JobId
    at: Nanos
    node: NodeId = NodeId("")
    seq: int = 0


class UserError(Struct, frozen=True, kw_only=True):
    """An exception that left the user's code, as the SDK or the launcher stub saw it."""

    type: str
    message: str
    file: str = ""
    line: int = 0
    function: str = ""
    step: int | None = None
    traceback: tuple[str, ...] = ()
    consequence: bool = False
    """True when the exception followed an aborted or broken collective: a victim, not a culprit."""

    @property
    def signature(self) -> str:
        """Equal for two exceptions of the same type raised at the same place."""
        return f"{self.type}@{self.file}:{self.line}"


class SlotState(Struct, frozen=True, kw_only=True):
    """One live process as a (re-)joining agent found it."""

    slot: SlotId
    pid: int
    role: Literal["worker", "standby"]
    rank: Rank | None = None
    epoch: Epoch = Epoch(0)
    parked: bool = False
