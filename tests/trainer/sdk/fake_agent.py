"""A fake agent and controller for one node: speaks ``model.wire``, opens epochs, holds the stores."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from torch._C._distributed_c10d import TCPStore

from keepstep.model import env
from keepstep.model.ids import Epoch, JobId, NodeId, Rank, SlotId, next_major
from keepstep.model.topology import Member, Place, Roster
from keepstep.model.wire import (
    AgentToWorker,
    Frame,
    TakeSeat,
    Unpacker,
    WorkerHello,
    WorkerToAgent,
    pack,
)
from tests.trainer.sdk.zygote import Child, Zygote

ZYGOTE: Zygote | None = None
"""Set by the fixture ``warm_parent``."""
SCRIPT = Path(__file__).with_name("train_script.py")


class FakeAgent:
    """Starts workers, seats them, and remembers every frame they send as (slot, frame)."""

    def __init__(self, world: int, *, snapshot_every: int = 1, script: Path = SCRIPT, **variables: str) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="ks", dir="/tmp"))
        self.node_dir = self.root / "n"
        self.run_dir = self.root / "run"
        for directory in (self.node_dir / env.BEAT_DIR, self.node_dir / env.SNAP_DIR, self.run_dir):
            directory.mkdir(parents=True)
        self.world, self.every, self.script = world, snapshot_every, script
        self.variables = {"ONCE": str(self.root / "once"), **variables}
        self.epoch, self.stores = Epoch(0), []
        self.places = (Place(node=NodeId("n"), host="127.0.0.1", keeper_port=0, peer_port=0),)
        self.token = ""
        self.heard: list[tuple[str, Frame]] = []
        self.news = threading.Condition()
        self.connections: dict[str, socket.socket] = {}
        self.processes: dict[str, Child] = {}
        self.slots: dict[int, str] = {}
        self.roster: Roster | None = None
        self._numbers = iter(range(1000))
        self.listen()

    # ------------------------------------------------------------ lifecycle

    def listen(self) -> None:
        path = self.node_dir / env.AGENT_SOCKET
        path.unlink(missing_ok=True)
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(path))
        self.listener.listen(64)
        threading.Thread(target=self._accept, args=(self.listener,), daemon=True).start()

    def hang_up(self) -> None:
        """The agent dies: every connection breaks, nobody listens."""
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        for connection in self.connections.values():
            connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        self.connections.clear()

    def close(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
            process.wait()
        self.hang_up()
        shutil.rmtree(self.root, ignore_errors=True)

    def __enter__(self) -> FakeAgent:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------ processes

    def spawn(self, *, standby: bool = False) -> str:
        slot = f"s{next(self._numbers)}"
        environment = {k: v for k, v in os.environ.items() if not k.startswith("KEEPSTEP_")} | {
            env.JOB: "job",
            env.NODE: "n",
            env.SLOT: slot,
            env.NODE_DIR: str(self.node_dir),
            env.RUN_DIR: str(self.run_dir),
            env.ROLE: "standby" if standby else "worker",
            "OMP_NUM_THREADS": "1",
            "TORCH_CPP_LOG_LEVEL": "FATAL",
            **self.variables,
        }
        assert ZYGOTE is not None
        out, err = self.root / f"{slot}.out", self.root / f"{slot}.err"
        self.processes[slot] = ZYGOTE.spawn(str(self.script), environment, str(out), str(err))
        return slot

    def start(self, mode: str = "fresh", standbys: int = 0) -> None:
        for rank in range(self.world):
            self.slots[rank] = self.spawn()
        self.standbys = deque(self.spawn(standby=True) for _ in range(standbys))
        self.open_epoch(mode)

    def open_epoch(self, mode: str, newcomers: tuple[int, ...] = (), replica_node: str | None = None) -> Roster:
        self.epoch = next_major(self.epoch)
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.stores.append(store)
        members = tuple(
            Member(rank=Rank(rank), node=NodeId("n"), slot=SlotId(slot), local_rank=rank, newcomer=rank in newcomers)
            for rank, slot in sorted(self.slots.items())
        )
        roster = Roster(
            job=JobId("job"),
            epoch=self.epoch,
            origin="controller",
            mode=mode,  # type: ignore[arg-type]
            world_size=self.world,
            members=members,
            places=self.places,
            store_host="127.0.0.1",
            store_port=store.port,
            snapshot_every=self.every,
        )
        with self.news:
            self.roster = roster
        self.write_roster()
        for slot in self.slots.values():
            self.seat(slot)
        return roster

    def write_roster(self) -> None:
        (self.node_dir / "roster").write_bytes(msgspec.msgpack.encode(self.roster))

    def replace(self, rank: int, replica_node: str | None = None) -> Roster:
        """Give a dead rank's seat to a parked standby."""
        slot = self.standbys.popleft()
        self.wait(lambda: slot in self.connections, f"{slot} to park")
        self.slots[rank] = slot
        return self.open_epoch("in_process", newcomers=(rank,), replica_node=replica_node)

    def kill(self, rank: int) -> None:
        process = self.processes[self.slots[rank]]
        process.kill()
        process.wait()

    def wait_exit(self, rank: int, limit_s: float = 30) -> int:
        return self.processes[self.slots[rank]].wait(limit_s)

    # ------------------------------------------------------------ conversation

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=self._hear, args=(connection,), daemon=True).start()

    def _hear(self, connection: socket.socket) -> None:
        unpacker: Unpacker[Any] = Unpacker(WorkerToAgent)
        slot = ""
        while True:
            try:
                data = connection.recv(65536)
            except OSError:
                return
            if not data:
                return
            for frame in unpacker.feed(data):
                if isinstance(frame, WorkerHello):
                    slot = frame.slot
                    with self.news:
                        self.connections[slot] = connection
                        newer = self.roster is not None and self.roster.epoch > frame.epoch
                    if newer:
                        self.seat(slot)
                with self.news:
                    self.heard.append((slot, frame))
                    self.news.notify_all()

    def seat(self, slot: str) -> None:
        roster = self.roster
        assert roster is not None
        rank = next((m.rank for m in roster.members if m.slot == slot), None)
        if rank is not None:
            self.send(slot, TakeSeat(roster=roster, rank=rank))

    def send(self, slot: str, frame: AgentToWorker) -> None:
        connection = self.connections.get(slot)
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.sendall(pack(frame))

    def frames(self, kind: type[Frame], epoch: int | None = None) -> list[tuple[int, Any]]:
        """(rank, frame) of one kind, in order of arrival."""
        ranks = {slot: rank for rank, slot in self.slots.items()}
        with self.news:
            return [
                (ranks.get(slot, -1), frame)
                for slot, frame in self.heard
                if isinstance(frame, kind) and (epoch is None or getattr(frame, "epoch", None) == epoch)
            ]

    def wait(self, condition: Callable[[], bool], what: str, limit_s: float = 40) -> None:
        deadline = time.monotonic() + limit_s
        with self.news:
            while not condition():
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError(f"waited {limit_s} s for {what}\n{self.errors()}")
                self.news.wait(min(left, 0.05))

    def wait_frames(self, kind: type[Frame], count: int, epoch: int | None = None) -> list[tuple[int, Any]]:
        self.wait(lambda: len(self.frames(kind, epoch)) >= count, f"{count} {kind.__name__} in epoch {epoch}")
        return self.frames(kind, epoch)

    def errors(self) -> str:
        """What the workers said, and where they stand."""
        for process in self.processes.values():
            process.send(signal.SIGUSR1)
        time.sleep(0.3)
        heard = [f"{slot}: {type(frame).__name__} {getattr(frame, 'epoch', '')}" for slot, frame in self.heard]
        errors = (f"--- {path.name}\n{path.read_text()[-3000:]}" for path in sorted(self.root.glob("s*.err")))
        return "\n".join([*heard, *errors])

    def losses(self) -> dict[int, dict[int, str]]:
        """The last loss of each step, by rank."""
        found: dict[int, dict[int, str]] = {}
        for path in self.run_dir.glob("steps/rank*.jsonl"):
            lines = [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]
            found[int(path.stem[4:])] = {line["step"]: line["loss"] for line in lines}
        return found
