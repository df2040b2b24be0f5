"""``keepstep logs``: what the ranks wrote, merged in order of time; or only the failure that explains the others."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from msgspec import Struct

from keepstep.cli import dirs
from keepstep.cli.errors import NotFound
from keepstep.cli.merge import merge, prefix
from keepstep.cli.say import say
from keepstep.cli.show import hint
from keepstep.cli.source import Source, find, node_configs
from keepstep.cli.where import Where

POLL_S = 0.2
LONGEST_LINE = 64 << 10
"""Bytes; a longer line is shown in pieces."""
STREAMS = ("out", "err")
_FILE = re.compile(r"rank_(\d+)(?:\.\w+)?\.(out|err)")


class RankFile(Struct, frozen=True, kw_only=True):
    """One stream of one rank in one attempt."""

    attempt: int
    node: str
    rank: int
    stream: str
    path: Path


def show_logs(where: Where, job: str, *, rank: int | None, first_error: bool, follow: bool) -> int:
    source = find(where, job)
    if first_error:
        return _show_first_error(source)
    if source.run_dir is None:
        raise NotFound("ranks write to files on their own nodes", help="run `keepstep logs` on a node of the job")
    folders = log_dirs(source.run_dir)
    files = [one for one in find_files(folders) if rank is None or one.rank == rank]
    if not files and not follow:
        wanted = "any rank" if rank is None else f"rank {rank}"
        raise NotFound(
            f"there is no output of {wanted} in {', '.join(map(str, folders))}", help="is it on another node?"
        )
    if follow:
        _follow(source.run_dir, folders, rank)
    else:
        _print_all(files)
        hint("next: keepstep logs --first-error")
    return 0


def log_dirs(run_dir: Path) -> list[Path]:
    """Where the launchers of this machine told their agents to write."""
    found = [Path(config["output"]["log_dir"]) for config in node_configs(run_dir)]
    return list(dict.fromkeys(found)) or [run_dir / "logs"]


def find_files(folders: list[Path]) -> list[RankFile]:
    """``<attempt>/<node>/rank_<r>.{out,err}`` in order of attempt, rank, stream."""
    found = []
    for folder in folders:
        for path in folder.glob("*/*/rank_*.*"):
            name = _FILE.fullmatch(path.name)
            attempt = path.parent.parent.name.rpartition("_")[2]
            if name and attempt.isdecimal():
                found.append(
                    RankFile(attempt=int(attempt), node=path.parent.name, rank=int(name[1]), stream=name[2], path=path)
                )
    return sorted(found, key=lambda one: (one.attempt, one.rank, STREAMS.index(one.stream), one.node, one.path.name))


def _print_all(files: list[RankFile]) -> None:
    attempts = list(dict.fromkeys(one.attempt for one in files))
    for attempt in attempts:
        if len(attempts) > 1:
            sys.stdout.flush()
            say(f"output of attempt {attempt}, of {len(attempts)}")
        mine = [one for one in files if one.attempt == attempt]
        nodes = {one.rank: one.node for one in mine}
        for merged in merge(*(_outputs(mine, stream) for stream in STREAMS)):
            print(f"{prefix(merged.ranks, nodes)} {merged.line}")


def _outputs(files: list[RankFile], stream: str) -> dict[int, Iterator[str]]:
    """Each rank's lines on one stream; a rank that several processes have held has several files."""
    paths: dict[int, list[Path]] = {}
    for one in files:
        if one.stream == stream:
            paths.setdefault(one.rank, []).append(one.path)
    return {rank: _lines(mine) for rank, mine in paths.items()}


def _lines(paths: list[Path]) -> Iterator[str]:
    for path in paths:
        with path.open(errors="replace") as file:
            while line := file.readline(LONGEST_LINE):
                yield line.rstrip("\n")


class Tail:
    """One growing file, read in whole lines."""

    def __init__(self, one: RankFile) -> None:
        self.one = one
        self._file = one.path.open("rb")
        self._rest = b""

    def more(self) -> list[str]:
        data = self._rest + self._file.read(1 << 20)
        *whole, self._rest = data.split(b"\n")
        if len(self._rest) > LONGEST_LINE:
            whole.append(self._rest)
            self._rest = b""
        return [line.decode(errors="replace") for line in whole]

    def close(self) -> list[str]:
        """What never got its newline."""
        self._file.close()
        return [self._rest.decode(errors="replace")] if self._rest else []


def _follow(run_dir: Path, folders: list[Path], rank: int | None) -> None:
    """Show what is there and what comes, until the job has written its exit code and nothing more comes."""
    tails: dict[Path, Tail] = {}
    while True:
        over = (run_dir / "exit.json").exists() and not dirs.is_live(run_dir)
        for one in find_files(folders):
            if one.path not in tails and (rank is None or one.rank == rank):
                tails[one.path] = Tail(one)
        came = {path: tail.more() for path, tail in tails.items()}
        _print_together([(tails[path].one, lines) for path, lines in came.items()])
        if not any(came.values()):
            if over:
                break
            time.sleep(POLL_S)
    _print_together([(tail.one, tail.close()) for tail in tails.values()])


def _print_together(came: list[tuple[RankFile, list[str]]]) -> None:
    """What has come since the last look, in the order of time where lines tell theirs."""
    for merged in merge(*({number: lines} for number, (_, lines) in enumerate(came))):
        one = came[merged.ranks[0]][0]
        print(f"{one.node}:r{one.rank} {merged.line}", flush=True)


def _show_first_error(source: Source) -> int:
    """The earliest failed process that is not a consequence of another; with its last words."""
    failures = [event["record"] for event in source.events() if event.get("fact") in ("WorkerExited", "WorkerFrozen")]
    facts = [record["fact"] for record in failures if _failed(record["fact"])]
    causes = [fact for fact in facts if not (fact.get("error") or {}).get("consequence")] or facts
    if not causes:
        hint("no process has failed so far")
        return 0
    first = min(causes, key=lambda fact: fact["at"])
    print(_headline(first))
    error = first.get("error") or {}
    for line in error.get("traceback") or first.get("first_error") or first.get("stderr_tail") or ():
        print(f"  | {line.rstrip()}")
    if len(facts) > 1:
        hint(f"{len(facts) - 1} more followed; next: keepstep incidents")
    return 0


def _failed(fact: dict[str, Any]) -> bool:
    return bool(fact.get("code") or fact.get("signal") or fact["type"] == "WorkerFrozen") and not fact.get(
        "killed_by_us"
    )


def _headline(fact: dict[str, Any]) -> str:
    from keepstep.controlplane.moments import when

    error = fact.get("error")
    if error:
        what = f"{error['type']}: {error['message']} ({error.get('file', '?')}:{error.get('line', 0)})"
    elif fact["type"] == "WorkerFrozen":
        what = f"process in state {fact['state']} for {fact['for_s']:.1f} s"
    else:
        what = f"killed by signal {fact['signal']}" if fact.get("signal") else f"exit code {fact.get('code')}"
    return f"{when(fact['at'])} {fact.get('node', '?')}:r{fact['rank']} {what}"
