"""The ten ways in which a job stands still or crawls, how each is made, and who is to blame."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from benchmarks.localise_files import StallingFiles
from benchmarks.localise_net import Hosts
from benchmarks.localise_score import Truth
from benchmarks.progress import until
from keepstep.cli.demo_cluster import Cluster
from keepstep.cli.demo_proc import send

STRIKE_LIMIT_S = 30.0
NODES, RANKS = 4, 8
BATCH_BYTES = 512
"""What a rank of the worker reads in each step."""
SLOW_S = 0.08
"""What a slow rank takes longer for each step, on a step of about 0.05 s."""


class Scene(Struct):
    """One job that is to be hurt, and what it can be hurt with."""

    cluster: Cluster
    orders: Path
    files: StallingFiles | None = None
    hosts: Hosts | None = None


class Struck(Struct, frozen=True):
    """Attributes:
    onset: wall-clock nanoseconds.
    undo: to be called once the verdict is in, for what nobody can be asked to repair: storage, cables.
    """

    truth: Truth
    onset: int
    undo: Callable[[], None] = lambda: None


Strike = Callable[[Scene, int, int, random.Random], Struck]
"""(scene, number of the trial, rank that is drawn, further luck)"""


class Case(Struct, frozen=True, kw_only=True):
    """Attributes:
    words: for the script. ``flags``: of ``keepstep run``.
    node_may_go: the process's machine may well be at fault, so that taking it out harms nobody.
    network, storage: what it needs besides processes; both need root.
    """

    name: str
    told: str
    strike: Strike
    words: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    node_may_go: bool = False
    network: bool = False
    storage: bool = False


def frozen(scene: Scene, number: int, rank: int, draw: random.Random) -> Struck:
    """SIGSTOP, at any instant of a step."""
    time.sleep(draw.random() * 0.1)
    pid, onset = scene.cluster.pid_of(rank), time.time_ns()
    send(pid, signal.SIGSTOP)
    return Struck(Truth(ranks=(rank,)), onset, lambda: _continue(pid))


def _continue(pid: int) -> None:
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGCONT)


def loop(scene: Scene, number: int, rank: int, draw: random.Random) -> Struck:
    """Before the half's reduction, or behind the world's."""
    return order(scene, number, rank, fault="loop", early=draw.random() < 0.5)


def loader(scene: Scene, number: int, rank: int, draw: random.Random) -> Struck:
    """One of the rank's loader processes takes a lock that it holds."""
    _place(scene.orders / f"loader{rank}", str(number))
    return Struck(Truth(ranks=(rank,)), _struck(scene, number, rank))


def storage(scene: Scene, number: int, rank: int, draw: random.Random) -> Struck:
    """One rank's read is not answered any more."""
    assert scene.files is not None
    return _stall(scene, scene.files, (rank,), Truth(ranks=(rank,)))


def storage_of_all(scene: Scene, number: int, rank: int, draw: random.Random) -> Struck:
    """No rank's read is answered any more: nobody's fault among the ranks and their nodes."""
    assert scene.files is not None
    return _stall(scene, scene.files, tuple(range(RANKS)), Truth())


def _stall(scene: Scene, files: StallingFiles, ranks: tuple[int, ...], truth: Truth) -> Struck:
    step = max(scene.cluster.steps().values()) + 2  # all ranks come to it, and none is already behind it
    files.stall(ranks, step * BATCH_BYTES)
    until(lambda: files.waiting >= len(ranks), STRIKE_LIMIT_S, "reads that wait", scene.cluster.tail)
    return Struck(truth, time.time_ns(), files.release)


def skip(scene: Scene, number: int, rank: int, draw: random.Random) -> Struck:
    return order(scene, number, rank, fault="skip")


def shape(scene: Scene, number: int, rank: int, draw: random.Random) -> Struck:
    """The same reduction with another number of elements."""
    return order(scene, number, rank, fault="shape", elements=draw.choice((4, 40, 4096)))


def other_group(scene: Scene, number: int, rank: int, draw: random.Random) -> Struck:
    """It waits for ever in code of its own; its half waits for it in one group, the others in another."""
    return order(scene, number, rank, fault="blocked")


def slow(scene: Scene, number: int, rank: int, draw: random.Random) -> Struck:
    """It computes or sleeps longer in every step, until it is told to stop that."""
    how = draw.choice(("burn", "sleep"))
    struck = order(scene, number, rank, fault="slow", how=how, seconds=SLOW_S)

    def calm() -> None:
        with contextlib.suppress(TimeoutError):
            order(scene, number + 1000, rank, fault="slow", how=how, seconds=0.0)

    return Struck(struck.truth, struck.onset, calm)


def cut(scene: Scene, number: int, rank: int, draw: random.Random) -> Struck:
    """Between two nodes nothing arrives any more, in both directions; each still reaches all others."""
    assert scene.hosts is not None
    pair = draw.choice(((1, 2), (2, 3)))  # neighbours in the rings; the first node has the controller
    onset = time.time_ns()
    scene.hosts.cut(*pair)
    nodes = tuple(f"node-{index}" for index in pair)
    return Struck(Truth(nodes=nodes), onset, scene.hosts.heal)


def order(scene: Scene, number: int, rank: int, **what: object) -> Struck:
    """Tell the rank to go wrong in its next step, and wait until it has."""
    _place(scene.orders / f"rank{rank}", json.dumps({"number": number, **what}))
    return Struck(Truth(ranks=(rank,)), _struck(scene, number, rank))


def _place(path: Path, text: str) -> None:
    half = path.with_name(f".{path.name}")
    half.write_text(text)
    half.rename(path)


def _struck(scene: Scene, number: int, rank: int) -> int:
    path = scene.orders / f"struck-{number}-{rank}"
    until(path.exists, STRIKE_LIMIT_S, f"rank {rank} to go wrong", scene.cluster.tail)
    return int(path.read_text())


CASES: tuple[Case, ...] = (
    Case(name="frozen", told="a process is stopped", strike=frozen, node_may_go=True),
    Case(name="loop", told="a rank loops in Python", strike=loop),
    Case(name="loader", told="a data loader's process waits for itself", strike=loader, words=("--loaders", "1")),
    Case(name="storage", told="one rank's read is not answered", strike=storage, storage=True),
    Case(name="skip", told="a rank leaves a collective out", strike=skip),
    Case(name="shape", told="a rank brings another shape", strike=shape),
    Case(name="other-group", told="a rank waits outside, its peers in a smaller group", strike=other_group),
    Case(name="slow", told="a rank takes longer in every step", strike=slow, flags=("--pace-window", "1s")),
    Case(name="network", told="nothing arrives between two nodes", strike=cut, network=True),
    Case(name="storage-all", told="no rank's read is answered", strike=storage_of_all, storage=True),
)
