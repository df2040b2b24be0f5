"""What all parts of an agent share: who we are, what runs here, which roster holds, and the way to report.

Nothing in here waits or starts anything; it is the state that the parts read and the two doors (``report``,
``accept``) through which it changes.
"""

from __future__ import annotations

import contextlib
import socket
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec

from keepstep.agent import teller
from keepstep.agent.config import AgentConfig
from keepstep.agent.exceptions import BadConfig
from keepstep.agent.files import read_int, write_atomic
from keepstep.agent.herald import announce
from keepstep.agent.limits import HangDetect
from keepstep.agent.outbox import Outbox
from keepstep.agent.slots import Slot, Table
from keepstep.checkpoint import config as checkpoint_config
from keepstep.checkpoint.config import CheckpointConfig
from keepstep.model import env as names
from keepstep.model.facts import AnyFact, Fact
from keepstep.model.ids import Epoch, JobId, Nanos, NodeId, Rank, show_epoch
from keepstep.model.topology import Member, Roster

F = TypeVar("F", bound=Fact)


class Node:
    def __init__(self, config: AgentConfig) -> None:
        self.config = config
        self.spec = config.spec
        self.id = NodeId(config.node)
        self.job: JobId = config.spec.job
        self.boot = uuid.uuid4().hex[:12]
        self.dir = Path(config.node_dir)
        self.run_dir = Path(config.run_dir)
        self.hang = HangDetect.parse(config.spec.hang_detect)
        self.table = Table(self.dir)
        self.outbox = Outbox(self.run_dir / "outbox" / config.node, say=self.say)
        self.tell: Callable[[str], None] = teller.show
        """How lines reach the terminal; the agent's loop must not wait for that."""
        self.roster: Roster | None = None
        self.token = _read_token(config.token_file)
        self.steps: dict[Rank, int] = {}
        """Committed steps of each rank whose process has ended here."""
        self.level2 = False
        """A worker has called ``keepstep.init``: processes can be replaced one by one."""
        self.resumed = Epoch(0)
        """Newest epoch in which a rank of this node got its state: every rank had come through the rebuild then."""

    # ------------------------------------------------------------ doors

    def fact(self, kind: type[F], **fields: Any) -> F:
        """A fact of this node, now, not yet numbered."""
        return kind(job=self.job, at=Nanos(time.time_ns()), node=self.id, **fields)

    def report(self, kind: type[F], **fields: Any) -> F:
        """Tell the controller, now or as soon as it listens."""
        fact = self.fact(kind, **fields)
        numbered = self.outbox.add(concrete(fact))
        return cast(F, numbered) if numbered is not None else fact

    def accept(self, roster: Roster) -> str | None:
        """Make a roster the one that holds here; a sentence when it must be refused (fencing)."""
        if roster.job != self.job:
            return f"the roster is for job {roster.job}, this node runs {self.job}"
        current = self.roster
        if current is not None and roster.epoch < current.epoch:
            return f"epoch {show_epoch(roster.epoch)} is older than the accepted {show_epoch(current.epoch)}"
        if current is not None and roster.epoch == current.epoch:
            if roster.key == current.key:
                return None
            return (
                f"epoch {show_epoch(roster.epoch)} of {roster.origin} is a rival of {current.origin}'s, accepted before"
            )
        self.roster = roster
        # On disk before anything is done in its name: an agent that is started again must know its fence.
        write_atomic(self.dir / names.ROSTER_FILE, msgspec.msgpack.encode(roster))
        if current is None or current.run != roster.run:
            self.write_checkpoint_config()
        if not (roster.boundary_s > 0 and current is not None and current.seats_on(self.id)):
            self.tell_keeper()  # else see ``boundary.entered``
        if news := announce(roster):
            self.say(news)
        return None

    def write_checkpoint_config(self) -> None:
        """What trainers, keeper and archiver go by; before any of them is started."""
        spec = self.spec
        config = CheckpointConfig(
            job=spec.job,
            policy=spec.ckpt,
            layout=spec.layout,
            snapshot_every=spec.snapshot_every,
            level=2,
            run=self.roster.run if self.roster is not None else "",
        )
        try:
            checkpoint_config.write(self.dir, config)
        except OSError as error:
            self.say(f"the checkpoint engine's settings could not be written ({error.strerror}); its defaults hold")

    # ------------------------------------------------------------ questions

    def load(self) -> bool:
        """Pick up what an earlier agent of this job left on this node."""
        known = self.table.load()
        with contextlib.suppress(FileNotFoundError):
            data = (self.dir / names.ROSTER_FILE).read_bytes()
            try:
                self.roster = msgspec.msgpack.decode(data, type=Roster)
            except msgspec.DecodeError as error:
                raise BadConfig(f"{self.dir / names.ROSTER_FILE} is not a roster of this version: {error}") from error
        self.resumed = max((s.resumed for s in self.table), default=Epoch(0))
        self.level2 = any(s.attached or s.role == "standby" for s in self.table)
        return known

    def seat_of(self, slot: Slot) -> Member | None:
        """The seat of a slot in the roster that holds."""
        if self.roster is None:
            return None
        return next((m for m in self.roster.seats_on(self.id) if m.slot == slot.id), None)

    def seats(self) -> tuple[Member, ...]:
        return self.roster.seats_on(self.id) if self.roster is not None else ()

    @property
    def keeper_port(self) -> int:
        return read_int(self.dir / names.KEEPER_PORT_FILE) or 0

    def log_dir(self, attempt: int | None = None) -> Path:
        """Folder for output: of an attempt's ranks, or of the node's helpers."""
        base = Path(self.config.output.log_dir)
        folder = base / self.id if attempt is None else base / str(attempt) / self.id
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    # ------------------------------------------------------------ small services

    def tell_keeper(self) -> None:
        """The roster file has changed. Nobody listening is fine: the keeper reads the file when it starts."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock, contextlib.suppress(OSError):
            sock.setblocking(False)
            sock.sendto(b"roster", str(self.dir / names.KEEPER_SOCKET))

    def say(self, text: str) -> None:
        """One line for the person at the terminal; never an error if nobody reads."""
        self.tell(f"keepstep[{self.id}]: {text}")


def _read_token(path: str) -> str:
    if not path:
        return ""
    try:
        return Path(path).read_text().strip()
    except OSError as error:
        raise BadConfig(f"token file {path}: {error.strerror}; create one with 'keepstep token new {path}'") from error


def concrete(fact: Fact) -> AnyFact:
    """Every fact class is in the closed union; the type checker cannot know that of a base class."""
    return cast(AnyFact, fact)
