"""Workers' door: the Unix socket on which every trainer's control thread talks to its agent.

Frames become facts here. Nothing on a trainer's training path waits for this side.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import assert_never

from keepstep import __version__
from keepstep.agent.node import Node
from keepstep.agent.slots import Slot
from keepstep.model import env as names
from keepstep.model import exits
from keepstep.model.facts import (
    CollectiveBroken,
    GuardNoted,
    RankAdvanced,
    RankDone,
    RankJoined,
    RankResumed,
    ResumeFailed,
    SdkAttached,
    StandbyReady,
)
from keepstep.model.ids import Epoch, Rank, SlotId
from keepstep.model.position import RankPosition
from keepstep.model.wire import (
    PROTOCOL,
    AgentToWorker,
    FrameError,
    Refused,
    ShowPositions,
    TakeSeat,
    Unpacker,
    WorkerAdvanced,
    WorkerBroken,
    WorkerCannotResume,
    WorkerDone,
    WorkerFailed,
    WorkerGuarded,
    WorkerHello,
    WorkerJoined,
    WorkerPositions,
    WorkerResumed,
    WorkerToAgent,
    pack,
)

BACKLOG_BYTES = 8 * 1024 * 1024
"""A worker that lets this much pile up is cut off; its control thread connects again."""


POSITIONS_S = 0.5
"""How long ranks may take to say where torch's recorder has them; one whose control thread is stuck says nothing."""


@dataclass
class _Shown:
    """One question after positions, and the answers so far."""

    waits: set[SlotId]
    found: list[RankPosition] = field(default_factory=list)
    all: asyncio.Event = field(default_factory=asyncio.Event)


class Workers:
    """The live control connections, by slot."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._writers: dict[SlotId, asyncio.StreamWriter] = {}
        self._pids: dict[SlotId, int] = {}
        self._owed: dict[SlotId, AgentToWorker] = {}
        self._asked = 0
        self._shown: dict[int, _Shown] = {}
        self._server: asyncio.Server | None = None
        self.on_resumed: Callable[[Epoch], None] = lambda epoch: None
        self.on_parked: Callable[[], None] = lambda: None

    async def open(self) -> None:
        path = self._node.dir / names.AGENT_SOCKET
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        self._server = await asyncio.start_unix_server(self._converse, path=str(path))
        os.chmod(path, 0o600)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for writer in self._writers.values():
            writer.close()

    def send(self, slot: SlotId, frame: AgentToWorker) -> bool:
        """``False`` when that worker is not connected now; a seat is then told with its next hello."""
        writer = self._writers.get(slot)
        if writer is None or writer.is_closing():
            return False
        if writer.transport.get_write_buffer_size() > BACKLOG_BYTES:
            writer.close()
            return False
        writer.write(pack(frame))
        return True

    async def positions(self, slots: Iterable[Slot], within_s: float = POSITIONS_S) -> tuple[RankPosition, ...]:
        """Where the groups of these ranks stand by torch's recorder, of those that answer in time."""
        self._asked += 1
        self._shown[self._asked] = shown = _Shown(waits={s.id for s in slots if s.rank is not None})
        shown.waits = {slot for slot in shown.waits if self.send(slot, ShowPositions(request=self._asked))}
        if shown.waits:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(within_s):
                    await shown.all.wait()
        del self._shown[self._asked]
        return tuple(shown.found)

    def _positions(self, slot: Slot, frame: WorkerPositions) -> None:
        shown = self._shown.get(frame.request)
        if shown is None or slot.id not in shown.waits or slot.rank is None:
            return
        shown.waits.discard(slot.id)
        if frame.groups:
            shown.found.append(
                RankPosition(rank=slot.rank, slot=slot.id, groups=frame.groups, source="flight-recorder")
            )
        if not shown.waits:
            shown.all.set()

    def send_or_owe(self, slot: SlotId, frame: AgentToWorker) -> None:
        """Also to a worker that is on its way back to a restarted agent; one frame each, the newest."""
        if not self.send(slot, frame):
            self._owed[slot] = frame

    def seat(self, slot: Slot) -> bool:
        """Tell a worker its seat in the roster that holds."""
        member, roster = self._node.seat_of(slot), self._node.roster
        if member is None or roster is None:
            return False
        return self.send(slot.id, TakeSeat(roster=roster, rank=member.rank))

    # ------------------------------------------------------------ one connection

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        unpacker: Unpacker[WorkerToAgent] = Unpacker(WorkerToAgent)
        slot: Slot | None = None
        try:
            while data := await reader.read(65536):
                for frame in unpacker.feed(data):
                    if isinstance(frame, WorkerHello):
                        slot = self._admit(frame, writer)
                    elif slot is not None:
                        self._hear(slot, frame)
                    if slot is None:
                        await writer.drain()
                        return
        except FrameError as error:
            self._node.say(f"a worker's connection was closed: {error}")
        except OSError:
            pass
        finally:
            if slot is not None and self._writers.get(slot.id) is writer:
                del self._writers[slot.id]
            writer.close()

    def _admit(self, hello: WorkerHello, writer: asyncio.StreamWriter) -> Slot | None:
        slot = self._node.table.get(hello.slot)
        why = self._reason_to_refuse(hello, slot)
        if why is not None or slot is None:
            writer.write(pack(Refused(why=why or "unknown slot", code=exits.BAD_CONFIG)))
            return None
        old = self._writers.get(slot.id)
        if old is not None and old is not writer:
            old.close()
        self._writers[slot.id] = writer
        self._pids[slot.id] = hello.pid
        if slot.role == "standby":
            self._park(slot)
        else:
            self._attach(slot, hello)
            if self._node.roster is not None and hello.epoch < self._node.roster.epoch:
                self.seat(slot)
        if (owed := self._owed.pop(slot.id, None)) is not None:
            self.send(slot.id, owed)
        return slot

    def _reason_to_refuse(self, hello: WorkerHello, slot: Slot | None) -> str | None:
        if hello.protocol != PROTOCOL:
            return (
                f"the program's keepstep {hello.version} speaks protocol {hello.protocol}, the agent's "
                f"{__version__} speaks {PROTOCOL}; install one version for both"
            )
        if slot is None or not slot.is_program:
            return f"this node has no slot {hello.slot}; the process was not started by this agent or has been replaced"
        connected = slot.id in self._writers and not self._writers[slot.id].is_closing()
        if connected and self._pids.get(slot.id) != hello.pid:
            return (
                f"slot {hello.slot} is held by process {self._pids.get(slot.id)}, and process {hello.pid} asks for it, "
                "too; call keepstep.init in one process per rank only (guard it with if __name__ == '__main__')"
            )
        return None

    def _park(self, slot: Slot) -> None:
        if not slot.parked:
            slot.parked = True
            self._node.table.save()
            self._node.report(StandbyReady, slot=slot.id)
            self.on_parked()

    def _attach(self, slot: Slot, hello: WorkerHello) -> None:
        self._node.level2 = True
        if not slot.attached:
            slot.attached = True
            self._node.table.save()
            self._node.report(SdkAttached, slot=slot.id, version=hello.version)

    # ------------------------------------------------------------ frames to facts

    def _hear(self, slot: Slot, frame: WorkerToAgent) -> None:
        node = self._node
        rank = slot.rank if slot.rank is not None else Rank(-1)
        match frame:
            case WorkerHello():
                pass
            case WorkerBroken(epoch=epoch, step=step, error=error):
                node.report(CollectiveBroken, rank=rank, epoch=epoch, step=step, error=error)
            case WorkerJoined(epoch=epoch, ms=ms):
                node.report(RankJoined, rank=rank, epoch=epoch, ms=ms)
            case WorkerResumed():
                slot.resumed = max(slot.resumed, frame.epoch)
                node.resumed = max(node.resumed, frame.epoch)
                node.table.save()
                node.report(
                    RankResumed,
                    rank=rank,
                    epoch=frame.epoch,
                    step=frame.step,
                    newest=frame.newest,
                    source=frame.source,
                    phases=frame.phases,
                )
                self.on_resumed(frame.epoch)
            case WorkerAdvanced(epoch=epoch, step=step):
                node.report(RankAdvanced, rank=rank, epoch=epoch, step=step)
            case WorkerDone(epoch=epoch, step=step):
                slot.done = True
                node.table.save()
                node.report(RankDone, rank=rank, epoch=epoch, step=step)
            case WorkerGuarded():
                told = {name: getattr(frame, name) for name in frame.__struct_fields__}
                node.report(GuardNoted, **told)
            case WorkerPositions():
                self._positions(slot, frame)
            case WorkerFailed(error=failure):
                slot.failure = failure
                node.table.save()
            case WorkerCannotResume(epoch=epoch, why=why):
                node.report(ResumeFailed, rank=rank, epoch=epoch, why=why)
            case _:
                assert_never(frame)
