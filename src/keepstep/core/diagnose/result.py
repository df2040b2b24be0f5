"""What a diagnosis says."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

Category = Literal["infrastructure", "user_code", "data", "transient", "none", "unknown"]
Action = Literal[
    "replace_node",
    "restart_in_place",
    "retry_with_backoff",
    "isolate_and_verify",
    "stop_and_notify_user",
    "rollback_code",
    "rollback_checkpoint_and_skip_data",
    "use_previous_checkpoint",
    "free_storage_then_resume",
    "no_action",
    "investigate",
]
"""``investigate`` is the answer to an unknown cause: nobody is evicted and nothing is stopped for it."""


class Culprit(Struct, frozen=True, kw_only=True):
    """Who or what it is; an empty field is not known from the log.

    Attributes:
        gpu: PCI address, or index on the node.
        rank: global rank.
        file: innermost source file of the user's own code.
        peer: the other end of a connection.
        link: network device, NVLink, switch port.
        thing: what else bears the guilt: a mount, a device, a checkpoint, a shard, a package, a setting.
    """

    node: str = ""
    gpu: str = ""
    rank: int | None = None
    file: str = ""
    line: int | None = None
    peer: str = ""
    link: str = ""
    thing: str = ""


class Evidence(Struct, frozen=True, kw_only=True):
    """One line of the log, as it stands there (cut in the middle when long).

    Attributes:
        line_number: counted from 1 in its own file.
        source: name of the file, where there are several.
        time: seconds since 1970 where the line tells it, else ``None``.
    """

    line_number: int
    rank: int | None = None
    node: str = ""
    time: float | None = None
    text: str = ""
    source: str = ""


class Alternative(Struct, frozen=True, kw_only=True):
    """Another explanation and how probable it is, 0 to 1."""

    root_cause: str
    probability: float


class Rejected(Struct, frozen=True, kw_only=True):
    """A loud kind of line that is not the cause, and why not."""

    root_cause: str
    why: str


class Diagnosis(Struct, frozen=True, kw_only=True):
    """The answer.

    Attributes:
        root_cause: a stable snake_case name, a colon, one sentence.
        transient: whether the same machines would probably succeed if tried again; ``None`` when unknown.
        action: what to do, verb first.
        advice: the same for people, a sentence.
        confidence: 0 to 1.
        evidence: the causal lines, the first one first.
        cascade: lines that are only consequences, counted by kind.
    """

    category: Category
    root_cause: str
    summary: str
    transient: bool | None
    action: Action
    advice: str = ""
    culprit: Culprit = Culprit()
    confidence: float
    evidence: tuple[Evidence, ...] = ()
    cascade: dict[str, int] = {}
    alternatives: tuple[Alternative, ...] = ()
    rejected: tuple[Rejected, ...] = ()
