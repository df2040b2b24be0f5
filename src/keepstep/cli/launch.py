"""The launcher: one per node. It starts what trains, starts it again when it dies, and leaves nothing behind.

Order of a start: judge the words (``plan``), look at the machine (``preflight``), settle where the job lives and who
hosts its controller (``settle``), then start the agent and do nothing but watch. The launcher holds no state that
training needs: when it is killed, agent and controller see its end and leave in good order.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from keepstep.agent import proc
from keepstep.agent.files import write_atomic
from keepstep.cli import family, flags, policy, preflight
from keepstep.cli.banner import announce
from keepstep.cli.children import Budget, Child, Signals
from keepstep.cli.home import Home
from keepstep.cli.plan import Plan, make_plan
from keepstep.cli.say import say
from keepstep.cli.settle import settle
from keepstep.model import exits

STOP_GRACE_S = 45.0
"""After the first signal: the agent's own grace for the processes (10 s), its clean-up, and room. Then SIGKILL."""
SECOND_S = 0.3
"""Two ctrl-C closer than this are one: a terminal and a wrapper such as make both pass it on."""
CRASHES = 3
"""Crashes of the agent by its own error, in a row, that are answered by a restart; the same error would come again."""
LEAVE_S = 3.0
"""How long processes may take to leave by themselves once the agent has left."""
CONTROLLER_LEAVE_S = 5.0
"""The same for the controller, after SIGTERM."""


def run(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> int:
    """``keepstep run``: the exit code of the job.

    Raises:
        DoorError: refused; nothing is left behind.
    """
    plan = make_plan(flags.parse(argv, environ))
    checked = preflight.check(plan, environ)
    for remark in (*plan.remarks, *checked.remarks):
        say(remark)
    proc.become_subreaper()
    with Signals(plan.signals) as signals:
        home = settle(plan, checked, signals, environ)
        if isinstance(home, int):
            return home
        for remark in policy.taken(plan.ckpt, home.job):
            say(remark)
        announce(plan, home, checked.nproc)
        try:
            code = Watch(plan, home, signals).until_the_end()
            if code:
                explain(home, code)
            return code
        finally:
            leave(home, signals)


class Watch:
    """From the agent's first start to its last exit."""

    def __init__(self, plan: Plan, home: Home, signals: Signals) -> None:
        self.plan = plan
        self.home = home
        self.signals = signals
        self.agent = Child("agent", home.agent_argv)
        self.crashes = Budget(CRASHES)
        self.stopped_by: int | None = None
        self.stopped_at = 0.0
        self.began = time.time()

    def until_the_end(self) -> int:
        self.agent.start()
        while True:
            for number in self.signals.wait(self._patience()):
                if self._on_signal(number):
                    return self._kill(number)
            if self.stopped_by is not None and time.monotonic() > self.stopped_at + STOP_GRACE_S:
                say(f"the agent has not stopped within {STOP_GRACE_S:.0f} s: everything on this node is killed")
                return self._kill(self.stopped_by)
            self._tend_controller()
            code = self._tend_agent()
            if code is not None:
                return code
            family.reap_orphans(self._known())

    def _known(self) -> frozenset[int]:
        children = (self.agent, self.home.controller)
        return frozenset(child.pid for child in children if child is not None and child.pid is not None)

    def _patience(self) -> float | None:
        """Until the next thing that is due without a signal."""
        due = [child.due for child in (self.agent, self.home.controller) if child is not None and child.due is not None]
        if self.stopped_by is not None:
            due.append(self.stopped_at + STOP_GRACE_S)
        return None if not due else max(0.0, min(due) - time.monotonic()) + 0.001

    def _on_signal(self, number: int) -> bool:
        """Pass a signal on; True when the user insists."""
        now = time.monotonic()
        if self.stopped_by is None:
            self.stopped_by, self.stopped_at = number, now
            say(f"{signal.Signals(number).name}: stopping {self.home.job}; ctrl-C again kills at once")
            self.agent.send(signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)
            return not self.agent.running
        return number == signal.SIGINT and now > self.stopped_at + SECOND_S

    def _tend_controller(self) -> None:
        controller = self.home.controller
        if controller is None:
            return
        if controller.due is not None:
            if time.monotonic() >= controller.due:
                controller.start()
            return
        code = controller.poll()
        if code is None or self.stopped_by is not None or self.home.controller_lost:
            return
        if code in (exits.BAD_USAGE, exits.BAD_CONFIG) or not controller.plan_restart():
            self.home.controller_lost = True
            say(f"the controller ended with {_ended(code)} and is not started again; training goes on without it")
            say(f"see {self.home.controller_log}")
        else:
            say(f"the controller ended with {_ended(code)}; starting it again (training goes on meanwhile)")

    def _tend_agent(self) -> int | None:
        """The job's exit code, once the agent has given one."""
        if self.agent.due is not None:
            if time.monotonic() >= self.agent.due:
                self.agent.start()
            return None
        code = self.agent.poll()
        if code is None:
            return None
        if self.stopped_by is not None:
            return 128 + self.stopped_by if code < 0 else code
        if code >= 0 and not self._crashed(code):
            return code
        if code > 0 and self.crashes.delay(self.agent.lived_s) is None:
            say(f"the agent has crashed {self.crashes.used} times in a row; this node is given up (please report it)")
            self._write_exit(
                exits.NO_PROGRESS, f"the agent of node {self.home.node} crashed again and again", "unknown"
            )
            return exits.NO_PROGRESS
        if not self.agent.plan_restart():
            say(f"the agent has died {self.agent.budget.limit} times in a row ({_ended(code)}); this node is given up")
            self._write_exit(
                exits.REQUEUE, f"the agent of node {self.home.node} died again and again", "infrastructure"
            )
            return exits.REQUEUE
        say(f"the agent ended with {_ended(code)}; starting it again (its processes go on meanwhile)")
        return None

    def _crashed(self, code: int) -> bool:
        """An agent that leaves on purpose has written exit.json (or says with 64 to 66 why it cannot start)."""
        if code not in (1, 2):
            return False
        try:
            return (self.home.run_dir / "exit.json").stat().st_mtime < self.began
        except OSError:
            return True

    def _kill(self, number: int) -> int:
        family.kill_all(
            frozenset({self.home.controller.pid} if self.home.controller and self.home.controller.pid else ())
        )
        self._write_exit(128 + number, f"killed by the user ({signal.Signals(number).name})", "none")
        return 128 + number

    def _write_exit(self, code: int, why: str, category: str) -> None:
        """Only where the agent did not come to it."""
        path = self.home.run_dir / "exit.json"
        if not path.exists():
            said = {
                "schema": "keepstep.v1/Exit",
                "code": code,
                "why": why,
                "category": category,
                "node": self.home.node,
            }
            write_atomic(path, msgspec.json.encode(said))


def explain(home: Home, code: int) -> None:
    """The last line: a job that failed says why, and where to read on. The agent has written it to exit.json."""
    said: dict[str, Any] = {}
    with contextlib.suppress(OSError, msgspec.DecodeError):
        said = msgspec.json.decode((home.run_dir / "exit.json").read_bytes(), type=dict[str, Any])
    why = f": {said['why']}" if said.get("code") == code and said.get("why") else ""
    say(f"{home.job} ended with exit code {code}{why}")
    if why and said.get("incident"):
        say(f"next: `keepstep incident {said['incident']}`, or `keepstep logs {home.job} --first-error`")


def leave(home: Home, signals: Signals) -> None:
    """No process, no memory and no lock of this node stays, whatever happened before."""
    home.linger(lambda seconds: bool(signals.wait(seconds)))
    deadline = time.monotonic() + LEAVE_S
    spare = frozenset({home.controller.pid} if home.controller and home.controller.pid else ())
    while time.monotonic() < deadline and any(pid not in spare for pid in family.descendants()):
        family.reap_orphans(spare)
        time.sleep(0.01)
    killed = family.kill_all(spare)
    if home.controller is not None:
        home.controller.send(signal.SIGTERM)
        if home.controller.wait(CONTROLLER_LEAVE_S) is None:
            home.controller.send(signal.SIGKILL)
            home.controller.wait(CONTROLLER_LEAVE_S)
    killed += family.kill_all()
    if killed:
        say(f"{killed} processes had not left by themselves and were killed")
    home.vacate()


def _ended(code: int) -> str:
    if code < 0:
        return signal.Signals(-code).name if -code in signal.Signals._value2member_map_ else f"signal {-code}"
    return f"exit code {code}"
