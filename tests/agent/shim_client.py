"""A blocking client of the shim for tests."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


class ShimClient:
    """Starts a shim in ``node_dir`` (or finds the one that runs) and talks to it."""

    def __init__(self, node_dir: Path, *, grace_s: float = 30.0, warm: str = "none") -> None:
        self.dir = node_dir
        command = [sys.executable, "-m", "keepstep.agent.shim", "--node-dir", str(node_dir), "--warm", warm]
        self.process = subprocess.Popen([*command, "--orphan-grace-s", str(grace_s)], start_new_session=True)
        self.connect()

    def connect(self) -> dict[str, Any]:
        deadline = time.monotonic() + 10
        while True:
            self.sock = socket.socket(socket.AF_UNIX)
            try:
                self.sock.connect(str(self.dir / "shim.sock"))
                break
            except OSError:
                self.sock.close()
                assert time.monotonic() < deadline, "the shim did not open its socket"
                time.sleep(0.01)
        self.sock.settimeout(60)
        self.lines = self.sock.makefile("rb")
        self.send(op="hello")
        return self.wait("state")

    def send(self, **message: Any) -> None:
        self.sock.sendall(json.dumps(message).encode() + b"\n")

    def wait(self, event: str, **fields: Any) -> dict[str, Any]:
        """The next message of this kind; others are skipped."""
        for line in self.lines:
            message: dict[str, Any] = json.loads(line)
            if message["ev"] == event and all(message[k] == v for k, v in fields.items()):
                return message
        raise AssertionError(f"the shim closed the connection before {event}")

    def spawn(self, name: str, target: str, *args: str, kind: str = "script", start: str = "fork", **more: Any) -> int:
        request = {
            "op": "spawn",
            "id": name,
            "start": start,
            "kind": kind,
            "target": target,
            "args": list(args),
            "env": {**os.environ, **more.pop("env", {})},
            "cwd": str(more.pop("cwd", self.dir)),
            "out": str(self.dir / f"{name}.out"),
            "err": str(self.dir / f"{name}.err"),
            "error_file": str(self.dir / f"{name}.json"),
            **more,
        }
        self.send(**request)
        return int(self.wait("spawned", id=name)["pid"])

    def run(self, name: str, target: str, *args: str, **more: Any) -> tuple[int, str, str]:
        """Exit status as ``os.waitstatus_to_exitcode`` gives it, output, errors."""
        self.spawn(name, target, *args, **more)
        ended = self.wait("exit", id=name)
        self.send(op="ack", pid=ended["pid"])
        code = os.waitstatus_to_exitcode(ended["status"])
        return code, (self.dir / f"{name}.out").read_text(), (self.dir / f"{name}.err").read_text()

    def close(self) -> None:
        if self.process.poll() is None:
            self.send(op="leave")
            self.process.wait(10)
        self.lines.close()
        self.sock.close()
