"""A real controller process for tests: start, ask over HTTP, stop, kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import msgspec

from keepstep.controlplane.address import Address, read_address
from keepstep.controlplane.config import ControllerConfig
from keepstep.model.settings import Policy

START_S = 20.0


class ControllerProcess:
    """One run directory and, most of the time, one controller on it."""

    def __init__(self, run_dir: Path, **config: Any) -> None:
        self.run_dir = run_dir
        self.config = ControllerConfig(run_dir=str(run_dir), **{"policy": Policy(), **config})
        self.config_file = run_dir.parent / f"{run_dir.name}-controller-config.json"
        self.process: subprocess.Popen[bytes] | None = None
        self.stderr = run_dir.parent / f"{run_dir.name}-stderr.log"

    def __enter__(self) -> ControllerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def launch(self) -> subprocess.Popen[bytes]:
        """Start a process without waiting for it to listen."""
        self.config_file.write_bytes(msgspec.json.encode(self.config))
        with self.stderr.open("ab") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "keepstep.controlplane.main", "--config", str(self.config_file)], stderr=stderr
            )
        return self.process

    def start(self) -> Address:
        process = self.launch()
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            address = read_address(self.run_dir)
            if address is not None and address.pid == process.pid:
                return address
            assert process.poll() is None, f"left with {process.returncode}: {self.stderr.read_text()}"
            time.sleep(0.005)
        raise AssertionError(f"does not listen after {START_S} s: {self.stderr.read_text()}")

    def ends_with(self, *, seconds: float = START_S) -> tuple[int, str]:
        """Wait for the process to leave; its exit code, and what it said that is not a log line."""
        assert self.process is not None
        code = self.process.wait(seconds)
        lines = self.stderr.read_text().splitlines()
        return code, "\n".join(line for line in lines if not line.startswith("{"))

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def terminate(self) -> int:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(START_S)

    def http(self, path: str, body: object = None, *, token: str = "", headers: dict[str, str] | None = None) -> Any:
        """Status code and decoded answer."""
        address = read_address(self.run_dir)
        assert address is not None
        request = urllib.request.Request(
            f"http://127.0.0.1:{address.http_port}{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={**({"Authorization": f"Bearer {token}"} if token else {}), **(headers or {})},
        )
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def freeze(self, seconds: float) -> None:
        assert self.process is not None
        os.kill(self.process.pid, signal.SIGSTOP)
        time.sleep(seconds)  # the pause is the fault itself
        os.kill(self.process.pid, signal.SIGCONT)
