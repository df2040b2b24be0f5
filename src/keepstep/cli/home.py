"""A job's home on this node: its directories, its locks, its controller; and how it is left."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

from keepstep.cli import dirs
from keepstep.cli.children import Child
from keepstep.cli.errors import DoorError
from keepstep.cli.preflight import Checked
from keepstep.controlplane.address import Address, read_address

LINGER_S = 20.0
"""How long the controller of a finished job stays for the other nodes' last reports."""
LINGER_ASK_S = 1.0
LINGER_LOOK_S = 0.05
ABANDON_S = 5.0


class Home:
    """Everything that was settled, and the locks that keep it ours."""

    def __init__(self, job: str, run_dir: Path, checked: Checked) -> None:
        self.job, self.run_dir, self.root = job, run_dir, checked.root
        self.created = False
        """We made the run directory, so we may remove it while nothing has happened in it."""
        self.node = ""
        self.node_dir: Path | None = None
        self.controller: Child | None = None
        self.controller_lost = False
        """It is not started again: its budget is spent, or it cannot work."""
        self.controller_log = run_dir / "logs" / "controller.log"
        self.address: Address | None = None
        self.token_file = ""
        self.agent_argv: list[str] = []
        self._locks: list[int] = []

    def hold(self, fd: int) -> None:
        self._locks.append(fd)

    def linger(self, impatient: Callable[[float], bool]) -> None:
        """Where we host and the job is over: let the other nodes hear so before the controller leaves.

        Args:
            impatient: waits for some seconds and tells whether the user wants to leave now.
        """
        deadline = time.monotonic() + LINGER_S
        while self.controller is not None and self.controller.poll() is None and time.monotonic() < deadline:
            if not self._others_listen() or impatient(LINGER_LOOK_S):
                return

    def _others_listen(self) -> bool:
        from keepstep.cli.client import Api

        address = read_address(self.run_dir)
        if address is None:
            return False
        try:
            status = Api(address.host, address.http_port, token_file=address.token_file, timeout_s=LINGER_ASK_S).get(
                "status"
            )
        except DoorError:
            return False
        states = {job.get("state") for job in status.get("jobs", ())}
        over = states <= {"FINISHED", "FAILED", "STOPPED"}
        return over and bool(status.get("controller", {}).get("agents_connected"))

    def vacate(self) -> None:
        """Give memory and locks back; the run directory stays to be read."""
        if self.node_dir is not None:
            dirs.remove_node_dir(self.node_dir, self.root)
        for fd in self._locks:
            os.close(fd)
        self._locks.clear()

    def abandon(self) -> None:
        """Undo everything: the start did not come about."""
        if self.controller is not None:
            self.controller.send(signal.SIGKILL)
            self.controller.wait(ABANDON_S)
        self.vacate()
        if self.created:
            shutil.rmtree(self.run_dir, ignore_errors=True)
            dirs.unpoint_latest(self.run_dir)
