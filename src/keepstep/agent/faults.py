"""Chaos on request: faults that a person asked for, made as real as software can."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Callable

from keepstep.agent import proc
from keepstep.agent.node import Node
from keepstep.agent.slots import Slot
from keepstep.agent.workers import Workers
from keepstep.model.actions import InjectFault
from keepstep.model.wire import RaiseInjected, SlowDown

BEFORE_LOSS_S = 0.05
"""A lost node first says that it has the order, so that nobody repeats it to its successor."""


class Faults:
    def __init__(self, node: Node, workers: Workers) -> None:
        self._node = node
        self._workers = workers
        self.shim_pid: Callable[[], int] = lambda: 0

    def why_not(self, order: InjectFault) -> str | None:
        """A sentence when the fault cannot be made here."""
        if not self._node.spec.allow_inject:
            return "faults are refused: the job was not started with --allow-inject"
        if order.fault in ("node-loss", "store-loss"):
            return None
        slot = self._target(order)
        if slot is None:
            return f"rank {order.rank} does not run on node {self._node.id} now"
        if order.fault in ("exception", "slow") and not slot.attached:
            return f"rank {order.rank} has not called keepstep.init, so {order.fault!r} cannot reach it; try 'kill'"
        return None

    def carry_out(self, order: InjectFault) -> None:
        if self.why_not(order) is not None:
            return
        match order.fault:
            case "node-loss":
                asyncio.get_running_loop().call_later(BEFORE_LOSS_S, self._lose_node)
                return
            case "store-loss":
                for helper in (s for s in self._node.table if s.role == "store"):
                    proc.send_signal(helper.pid, helper.start, signal.SIGKILL)
                return
            case _:
                pass
        slot = self._target(order)
        assert slot is not None, "why_not has looked"
        match order.fault:
            case "kill":
                proc.send_signal(slot.pid, slot.start, signal.SIGKILL)
            case "freeze":
                proc.send_signal(slot.pid, slot.start, signal.SIGSTOP)
                if order.seconds > 0:
                    asyncio.get_running_loop().call_later(
                        order.seconds, proc.send_signal, slot.pid, slot.start, signal.SIGCONT
                    )
            case "exception":
                self._workers.send_or_owe(slot.id, RaiseInjected())
            case "slow":
                self._workers.send_or_owe(slot.id, SlowDown(seconds=order.seconds))

    def _target(self, order: InjectFault) -> Slot | None:
        return next((s for s in self._node.table.workers() if s.rank == order.rank and s.alive()), None)

    def _lose_node(self) -> None:
        """As a power cut: everything at once, no farewell, memory gone."""
        launcher = self._node.config.launcher_pid
        if launcher > 1:
            os.kill(launcher, signal.SIGSTOP)  # It must not start a new agent in between.
        for pid in (self.shim_pid(), *(s.pid for s in self._node.table)):
            proc.kill_group(pid)
        shutil.rmtree(self._node.dir, ignore_errors=True)
        if launcher > 1:
            os.kill(launcher, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
