"""One round of a replay on real processes: a job per group, one process per machine, an outcome per group.

A group fails if a process ends with another code than 0 or by a signal, if it is not over at its deadline, or if what
it computed differs: a process may print ``checksum: TEXT`` (the last such line of its standard output counts), and
groups of the same size have to print the same, rank by rank. Everything runs in one thread over pidfds. Each process
has a session of its own, which is killed as a whole before the process is collected, so that data loaders do not
survive it and no number is used twice; when this process dies, the kernel kills its children.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import selectors
import signal
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from msgspec import Struct, field

from keepstep.core.locate.replay import Phase
from keepstep.model.ids import NodeId

TAIL_BYTES = 64 * 1024
"""How much of the end of a process's output is read."""
LINE = 160
"""Characters of its last words that a reason quotes."""
FEWEST_ALIKE = 2
"""Groups that have to agree, and be more than half of all of their size, before another result is called wrong."""
_CHECKSUM = re.compile(rb"^checksum:[ \t]*(\S+)[ \t]*\r?$", re.MULTILINE)
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


class Worker(Struct, frozen=True, kw_only=True):
    """A machine and how a process gets there.

    Attributes:
        host: where others of its group reach it.
        prefix: words before the command, for instance ``ssh -tt n17``; empty starts it here.
        environ: what only this machine's processes get.
    """

    machine: NodeId
    host: str = "127.0.0.1"
    prefix: tuple[str, ...] = ()
    environ: dict[str, str] = field(default_factory=dict)


class Job(Struct, frozen=True, kw_only=True):
    """What each group runs.

    Attributes:
        command: words; ``{rank}``, ``{world}``, ``{machine}``, ``{host}`` and ``{port}`` are filled in. The processes
            also get torch's ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``MASTER_ADDR`` and ``MASTER_PORT``.
        deadline_s: after it, a group that is not over has hung.
        grace_s: how long the others may take to end by themselves once one has failed.
        parallel: groups at the same time; 0 is all of them.
        port: first of the ports at which groups meet, one each; 0 takes ports that are free on this machine.
        expected: checksum that every process has to print; empty compares groups with each other.
    """

    command: tuple[str, ...]
    deadline_s: float = 600.0
    grace_s: float = 5.0
    parallel: int = 0
    port: int = 0
    expected: str = ""

    def __post_init__(self) -> None:
        if not self.command:
            raise ValueError("command must have at least one word")
        if self.deadline_s <= 0 or self.grace_s < 0 or self.parallel < 0:
            raise ValueError(
                f"deadline_s ({self.deadline_s}) must be positive, grace_s ({self.grace_s}) and parallel "
                f"({self.parallel}) not below 0"
            )


class Outcome(Struct, frozen=True, kw_only=True):
    """What became of one group.

    Attributes:
        kind: ``void`` if it could not be run, which proves nothing.
        sums: checksum of each rank; empty where none was printed.
        machine: where it showed first; a hint, since victims of another machine often die first.
    """

    group: int
    kind: Literal["passed", "failed", "void"]
    why: str
    seconds: float
    sums: tuple[str, ...] = ()
    machine: NodeId | None = None


def run_round(
    phase: Phase,
    wanted: Sequence[int],
    workers: Mapping[NodeId, Worker],
    job: Job,
    directory: Path,
    done: Callable[[Outcome], None],
) -> None:
    """Run these groups of a phase, at most ``job.parallel`` at once, and hand over each outcome as soon as it is there.

    Output of a group goes to ``directory/GROUP/RANK.out`` and ``.err`` and is kept unless the group passed.
    """
    with contextlib.closing(_Round(phase, wanted, workers, job, directory, done)) as round_:
        round_.run()


def judge_sums(outcomes: Sequence[Outcome], seen: Counter[tuple[str, ...]], expected: str = "") -> list[Outcome]:
    """Groups that passed, with wrong results turned into failures; ``void`` where it is open which of them is right.

    Args:
        seen: results of earlier rounds; those of this one are added.
    """
    passed = [outcome for outcome in outcomes if outcome.kind == "passed" and outcome.sums]
    seen.update(outcome.sums for outcome in passed)
    return [_judged(outcome, seen, expected) if outcome.kind == "passed" else outcome for outcome in outcomes]


def _judged(outcome: Outcome, seen: Counter[tuple[str, ...]], expected: str) -> Outcome:
    if expected:
        wrong = sorted(set(outcome.sums) - {expected}) if outcome.sums else ["none"]
        return _changed(outcome, "failed", f"checksum {wrong[0]} instead of {expected}") if wrong else outcome
    if not outcome.sums:
        return outcome
    alike = {sums: count for sums, count in seen.items() if len(sums) == len(outcome.sums)}
    best = max(alike, key=lambda sums: alike[sums])
    total = sum(alike.values())
    if len(alike) == 1 or (outcome.sums == best and 2 * alike[best] > total):
        return outcome
    if alike[best] >= FEWEST_ALIKE and 2 * alike[best] > total:
        rank = next(at for at, pair in enumerate(zip(outcome.sums, best, strict=True)) if pair[0] != pair[1])
        why = f"rank {rank} printed checksum {outcome.sums[rank]}, {alike[best]} of {total} groups {best[rank]}"
        return _changed(outcome, "failed", why)
    return _changed(outcome, "void", f"results differ and no majority of {total} groups agrees; give the expected one")


def _changed(outcome: Outcome, kind: Literal["failed", "void"], why: str) -> Outcome:
    return Outcome(group=outcome.group, kind=kind, why=why, seconds=outcome.seconds, sums=outcome.sums)


class _Running:
    """A group that runs."""

    def __init__(self, index: int, deadline: float) -> None:
        self.index, self.began, self.deadline = index, time.monotonic(), deadline
        self.alive: dict[int, subprocess.Popen[bytes]] = {}
        self.first = ""
        self.machine: NodeId | None = None


class _Round:
    def __init__(
        self,
        phase: Phase,
        wanted: Sequence[int],
        workers: Mapping[NodeId, Worker],
        job: Job,
        directory: Path,
        done: Callable[[Outcome], None],
    ) -> None:
        self._phase, self._workers, self._job, self._directory = phase, workers, job, directory
        self._waiting = list(wanted)
        self._running: dict[int, _Running] = {}
        self._fds: dict[int, tuple[int, int]] = {}
        self._selector = selectors.DefaultSelector()
        self._done = done

    def run(self) -> None:
        room = self._job.parallel or len(self._waiting)
        while self._waiting or self._running:
            while self._waiting and len(self._running) < room:
                self._start(self._waiting.pop(0))
            if not self._running:
                continue
            until = min(group.deadline for group in self._running.values())
            for key, _ in self._selector.select(max(0.0, until - time.monotonic())):
                self._ended(key.fd)
            for group in [g for g in self._running.values() if g.deadline <= time.monotonic()]:
                self._give_up(group)

    def close(self) -> None:
        """Kill what is left: nothing after ``run``, everything after an exception."""
        for group in list(self._running.values()):
            self._kill(group)
        self._selector.close()

    def _start(self, index: int) -> None:
        machines = self._phase.groups[index]
        group = _Running(index, time.monotonic() + self._job.deadline_s)
        self._running[index] = group
        host = self._workers[machines[0]].host
        port = self._job.port + index if self._job.port else _free_port()
        folder = self._directory / str(index)
        folder.mkdir(parents=True, exist_ok=True)
        for rank, machine in enumerate(machines):
            worker = self._workers[machine]
            words = {"rank": rank, "world": len(machines), "machine": machine, "host": host, "port": port}
            command = [*worker.prefix, *(_filled(word, words) for word in self._job.command)]
            environ = {"RANK": rank, "WORLD_SIZE": len(machines), "LOCAL_RANK": 0, "MASTER_ADDR": host}
            environ |= {"MASTER_PORT": port}
            try:
                with open(folder / f"{rank}.out", "wb") as out, open(folder / f"{rank}.err", "wb") as err:
                    process = subprocess.Popen(
                        command,
                        stdin=subprocess.DEVNULL,
                        stdout=out,
                        stderr=err,
                        env={**os.environ, **{name: str(value) for name, value in environ.items()}, **worker.environ},
                        start_new_session=True,
                        preexec_fn=_die_with(os.getpid()),
                    )
                group.alive[rank] = process
                fd = os.pidfd_open(process.pid)
            except OSError as error:
                self._kill(group)
                self._finish(group, "void", f"{command[0]} could not be started for {machine}: {error.strerror}")
                return
            self._fds[fd] = (index, rank)
            self._selector.register(fd, selectors.EVENT_READ)

    def _ended(self, fd: int) -> None:
        if fd not in self._fds:
            return  # killed meanwhile, together with its group
        index, rank = self._fds[fd]
        group = self._running[index]
        code = self._collect(fd, group, rank)
        if code and not group.first:
            machine = self._phase.groups[index][rank]
            how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            said = _last_line(self._directory / str(index) / f"{rank}.err")
            group.first = f"rank {rank} on {machine}: {how}" + (f" ({said})" if said else "")
            group.machine = machine
            group.deadline = min(group.deadline, time.monotonic() + self._job.grace_s)
        if not group.alive:
            self._finish(group, "failed" if group.first else "passed", group.first or "all processes ended with 0")

    def _give_up(self, group: _Running) -> None:
        left = [self._phase.groups[group.index][rank] for rank in sorted(group.alive)]
        self._kill(group)
        names = ", ".join(left[:4]) + (f" and {len(left) - 4} more" if len(left) > 4 else "")
        self._finish(group, "failed", group.first or f"not over after {self._job.deadline_s:g} s: {names} still ran")

    def _kill(self, group: _Running) -> None:
        for fd, (index, rank) in list(self._fds.items()):
            if index == group.index:
                self._collect(fd, group, rank)
        for process in group.alive.values():  # at most the one for which there was no descriptor left
            _end(process)

    def _collect(self, fd: int, group: _Running, rank: int) -> int:
        code = _end(group.alive.pop(rank))
        self._selector.unregister(fd)
        os.close(fd)
        del self._fds[fd]
        return code

    def _finish(self, group: _Running, kind: Literal["passed", "failed", "void"], why: str) -> None:
        del self._running[group.index]
        folder = self._directory / str(group.index)
        found = [_checksum(folder / f"{rank}.out") for rank in range(len(self._phase.groups[group.index]))]
        if kind == "passed" and any(found) and not all(found):
            kind, why = "failed", f"rank {found.index('')} printed no checksum, others did"
        if kind == "passed":
            for path in folder.iterdir():
                path.unlink()
            folder.rmdir()
        self._done(
            Outcome(
                group=group.index,
                kind=kind,
                why=why,
                seconds=round(time.monotonic() - group.began, 3),
                sums=tuple(found) if all(found) else (),
                machine=group.machine,
            )
        )


def _end(process: subprocess.Popen[bytes]) -> int:
    """End the session while its leader, be it a zombie, still holds the number; then collect the leader."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait()


def _die_with(parent: int) -> Callable[[], None]:
    """In the child: be killed when the thread that started it ends (``PR_SET_PDEATHSIG``, prctl(2))."""

    def inside() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return inside


def _filled(word: str, words: Mapping[str, object]) -> str:
    """Only the known fields: shell words are full of other braces."""
    for name, value in words.items():
        word = word.replace(f"{{{name}}}", str(value))
    return word


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _tail(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            return file.read()
    except FileNotFoundError:
        return b""


def _checksum(path: Path) -> str:
    found = _CHECKSUM.findall(_tail(path))
    return found[-1].decode(errors="replace")[:LINE] if found else ""


def _last_line(path: Path) -> str:
    lines = [line.strip() for line in _tail(path).decode(errors="replace").splitlines() if line.strip()]
    return lines[-1][:LINE] if lines else ""
