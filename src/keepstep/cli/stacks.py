"""``keepstep stacks``: where every process of a job stands, ranks in the same place put together."""

from __future__ import annotations

import getpass
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from keepstep.cli.errors import DoorError, UsageError
from keepstep.cli.render import check_form, paint
from keepstep.cli.say import plural, say
from keepstep.cli.show import job_name
from keepstep.cli.source import Source, find
from keepstep.cli.stacks_tree import tree
from keepstep.cli.where import Where
from keepstep.core.locate import collectives
from keepstep.core.locate.collectives import line
from keepstep.core.locate.hang import AWAY, HALTED
from keepstep.core.locate.stacks import Consensus, consensus, short, without_starters
from keepstep.model.ids import Rank
from keepstep.model.position import Link, RankPosition
from keepstep.model.stacks import ProcessStacks, ThreadStack
from keepstep.model.topology import fold_ranks

WAIT_S = 20.0
"""How long the nodes may take; what has come until then is shown."""
POLL_S = 0.2
HELD_S = 2.0
"""How long somebody must have been inside of a collective before it is said who holds it up."""


def show_stacks(
    where: Where, job: str, *, ranks: Sequence[int], native: bool, every: bool, threads: bool, group: bool, form: str
) -> int:
    """Ask, wait, put together, show.

    Args:
        group: as one tree of calls, in which each set of ranks goes its own way.
        every: each process by itself instead of one of each place.
        threads: all threads instead of the main one.
    """
    source = find(where, job)
    name = job_name(source, job)
    if any(rank < 0 for rank in ranks):
        raise UsageError(f"--rank {min(ranks)} is no rank", help="ranks count from 0; `keepstep job` lists them")
    body = {"by": getpass.getuser(), "ranks": list(ranks), "native": native}
    asked = source.post("jobs", name, "stacks", body=body)
    answer = _wait(source, name, int(asked["request"]))
    processes = msgspec.convert(answer["processes"], list[ProcessStacks])
    positions = {one.rank: one for one in msgspec.convert(answer["positions"], list[RankPosition])}
    found = consensus(processes)
    if check_form(form) in ("json", "jsonl"):
        print(msgspec.json.encode(_json(answer, found)).decode())
        return 0 if processes else 1
    if not processes:
        raise DoorError(f"no node of {name} has shown a process within {WAIT_S:g} s", help="`keepstep job` tells why")
    if group:
        _tree(processes, positions, found)
    else:
        _page(processes, positions, found, every=every, threads=threads)
    if told := _waited_for(positions, found):
        print(told)
    for link in msgspec.convert(answer["links"], list[Link]):
        say(f"rank {link.rank}: {link.peer} does not answer ({link.unacked:,} bytes, {link.timeouts} tries)")
    if not positions:
        say("no positions in collectives: only scripts that call keepstep.init() tell them")
    if missing := answer["missing"]:
        say(f"no answer yet from {', '.join(missing)}")
    return 0


def _wait(source: Source, name: str, request: int) -> dict[str, Any]:
    deadline = time.monotonic() + WAIT_S
    while True:
        answer = source.stacks(name, request)
        if not answer["missing"] or time.monotonic() > deadline:
            return answer
        time.sleep(POLL_S)


def _json(answer: dict[str, Any], found: Consensus) -> dict[str, Any]:
    return {**answer, **consensus_view(found)}


def consensus_view(found: Consensus) -> dict[str, Any]:
    """Ranks in the same place put together, and the odd ones, for tools."""
    places = [{"waits": p.waits, "ranks": list(p.ranks), "at": p.shown} for p in found.places]
    return {"places": places, "odd_ranks": list(found.odd), "all_wait_for_storage": found.storage}


def print_stacks(processes: list[ProcessStacks]) -> None:
    """The page of ``keepstep stacks``: one process of each place."""
    _page(processes, {}, consensus(processes), every=False, threads=False)


def _waited_for(positions: Mapping[Rank, RankPosition], found: Consensus) -> str:
    """Who holds the collectives up; empty while the job moves, where the next moment would tell something else."""
    inside = [group.inside for one in positions.values() for group in one.groups]
    if not any(one is not None and one.age_s >= HELD_S for one in inside):
        return ""
    away = [rank for place in found.places if place.waits in AWAY for rank in place.ranks if rank in found.odd]
    halted = [rank for place in found.places if place.waits in HALTED for rank in place.ranks]
    finding = collectives.find(positions.values(), elsewhere=away, halted=halted)
    if finding is None:
        return ""
    who = f"Rank {fold_ranks(finding.ranks)} " if finding.ranks else ""
    told = f"{who}{finding.reason}."
    return told[0].upper() + told[1:]


def _tree(processes: list[ProcessStacks], positions: Mapping[Rank, RankPosition], found: Consensus) -> None:
    count = sum(process.role == "trainer" for process in processes)
    print(f"{plural(count, 'rank')}, {plural(len(found.places), 'place')}")
    for told in tree(processes, positions):
        print(told)
    print()
    print(_verdict(found, count))


def _page(
    processes: list[ProcessStacks],
    positions: Mapping[Rank, RankPosition],
    found: Consensus,
    *,
    every: bool,
    threads: bool,
) -> None:
    trainers = {process.rank: process for process in processes if process.role == "trainer"}
    children = [process for process in processes if process.role == "child"]
    print(f"{plural(len(trainers), 'rank')}, {plural(len(found.places), 'place')}")
    for place in found.places:
        print()
        odd = set(place.ranks) <= set(found.odd)
        title = paint(f"{place.who} {place.doing}", "yellow" if odd else "bold")
        print(f"{title} (most others do not)" if odd else title)
        for rank in place.ranks if every else place.ranks[:1]:
            if rank in positions:
                print(f"  rank {rank}: {line(positions[rank])}")
            _process(trainers[rank], threads=threads, named=every or len(place.ranks) > 1)
            for child in (child for child in children if child.rank == rank):
                _process(child, threads=threads, named=True)
    print()
    print(_verdict(found, len(trainers)))


def _process(process: ProcessStacks, *, threads: bool, named: bool) -> None:
    if named:
        what = (
            f"rank {process.rank}" if process.role == "trainer" else f"  started by rank {process.rank}: {process.name}"
        )
        asleep = f" in {process.wchan}" if process.wchan else ""
        print(f"  {what}, pid {process.pid}, state {process.state}{asleep}, {process.cpu_s:.1f} s of processor time")
    if not process.threads:
        print(f"    no stack: {process.why}")
    elif process.why:
        print(f"    by faulthandler: {process.why}")
    main = process.main
    for thread in process.threads if threads else [main] if main else []:
        _thread(thread, titled=threads)


def _thread(thread: ThreadStack, *, titled: bool) -> None:
    if titled:
        print(f"    thread {thread.name or '?'}{', running' if thread.busy else ''}")
    frames = without_starters(thread.frames)
    for number, frame in enumerate(frames):
        if thread.cut and number == len(frames) - 1:
            print(f"      ... {thread.cut} calls")
        print(f"      {frame.function} ({short(frame.file)}:{frame.line})")


def _verdict(found: Consensus, world: int) -> str:
    if found.storage:
        return "All wait for storage: look at the file system, no node is to blame."
    if found.odd:
        return f"Rank {fold_ranks(found.odd)} is not where the other {world - len(found.odd)} are: look there first."
    if len(found.places) == 1:
        return "All ranks stand in the same place."
    return "No majority stands in one place."
