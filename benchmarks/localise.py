"""Ten ways to stand still or to crawl, on real processes: who is named, after how long, and who suffers for it?

    python -m benchmarks.localise --json

Each case is a job of its own under ``keepstep run``: eight gloo ranks on four pretended nodes, each with an agent of
its own, struck ``--trials`` times at another rank. ``declared_s``: from the onset until the controller knows that
something is wrong. ``time_to_suspect_s``: from there to the first suspect. ``top1_accuracy``: the first suspect is
exactly the culprit (of a pair both nodes; nobody where nobody is guilty). ``innocent_evictions``: processes killed and
nodes taken out that had nothing to do with it, during the whole recovery.

A blocked file system is a FUSE file system that stops answering (root), a cut network is one between network
namespaces (root); without root those cases are left out, and the report says so.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.localise_cases import CASES, NODES, RANKS, Case, Scene, Struck
from benchmarks.localise_files import StallingFiles
from benchmarks.localise_net import Hosts, NetCluster, missing
from benchmarks.localise_score import Verdict, innocent, right, rungs, stories, summary, verdict
from benchmarks.turns import scratch
from keepstep.cli.demo import clean_environment
from keepstep.cli.demo_cluster import Cluster, end_on_sigterm
from keepstep.cli.demo_watch import Watch
from keepstep.model.records import Record
from keepstep.ports import Entry

WORKER = Path(__file__).with_name("localise_worker_torch.py")
START_LIMIT_S = 180.0
VERDICT_LIMIT_S = 60.0
RECOVERY_LIMIT_S = 120.0
BREATH_STEPS = 15
"""Undisturbed steps before each fault."""


class Told(Watch):
    """Keeps the records that it folds."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(run_dir)
        self.records: list[Record] = []

    def _fold(self, entry: Entry) -> None:
        super()._fold(entry)
        self.records.append(entry.record)


class Job:
    """The job of one case, struck several times."""

    def __init__(self, home: Path, case: Case, args: argparse.Namespace) -> None:
        self.home, self.case = home, case
        self.orders = home / "orders"
        self.orders.mkdir(parents=True)
        words = ["--orders", str(self.orders), *case.words]
        words += ["--storage", str(home / "files")] if case.storage else []
        options: dict[str, Any] = {
            "job": f"localise-{case.name}",
            "script": WORKER,
            "args": words,
            "nodes": NODES,
            "nproc": RANKS // NODES,
            "flags": ("--standbys", "0", "--hang-detect", args.hang_detect, *case.flags, *args.flags),
            "environ": clean_environment() | {"TMPDIR": str(home / "tmp")},
        }
        (home / "tmp").mkdir()
        self.hosts = Hosts(NODES) if case.network else None
        self.files = StallingFiles(home / "files", RANKS) if case.storage else None
        self.cluster = NetCluster(home, self.hosts, **options) if self.hosts else Cluster(home, **options)
        self.told = Told(self.cluster.run_dir)
        self.cluster.watch = self.told
        self.scene = Scene(self.cluster, self.orders, self.files, self.hosts)

    @contextmanager
    def running(self) -> Iterator[None]:
        with ExitStack() as stack:
            if self.hosts is not None:
                stack.callback(self.hosts.down)
                self.hosts.up()
            if self.files is not None:
                self.files.start()
                stack.callback(self.files.close)
            stack.callback(self.cluster.close)
            if self.files is not None:
                stack.callback(self.files.release)
            self.cluster.start()
            yield

    def calm(self, limit_s: float) -> None:
        """Every rank trains, and has done so for some steps."""
        cluster = self.cluster
        cluster.until(self.told.settled, limit_s, "all ranks to train")
        base = cluster.floor()
        cluster.until(lambda: cluster.floor() >= base + BREATH_STEPS, limit_s, "quiet steps")

    def trial(self, number: int, rank: int, draw: random.Random) -> dict[str, Any]:
        """One fault, and what became of it."""
        self.calm(START_LIMIT_S if number == 0 else RECOVERY_LIMIT_S)
        roster, before = self.told.roster, self.cluster.beats()
        assert roster is not None
        seats = {int(member.rank): str(member.node) for member in roster.members}
        mark = len(self.told.records)
        struck = self.case.strike(self.scene, number, rank, draw)
        try:
            said = self._verdict(mark, struck, seats)
        finally:
            struck.undo()
        self.calm(RECOVERY_LIMIT_S)
        after = self.cluster.beats()
        replaced = [r for r, beat in before.items() if r in after and after[r].pid != beat.pid]
        told = self.told.records[mark:]
        home = {seats[r] for r in struck.truth.ranks} if self.case.node_may_go else set[str]()
        hurt = innocent(struck.truth, told, roster, replaced, forgivable={*struck.truth.nodes, *home})
        return self._row(struck, said, hurt, rungs(told))

    def _verdict(self, mark: int, struck: Struck, seats: dict[int, str]) -> Verdict | None:
        found: list[Verdict] = []

        def there() -> bool:
            said = verdict(stories(self.told.records[mark:], struck.onset), seats)
            found.extend([said] if said else [])
            return said is not None

        try:
            self.cluster.until(there, VERDICT_LIMIT_S, "a suspect")
        except TimeoutError:
            return None
        return found[0]

    def _row(self, struck: Struck, said: Verdict | None, hurt: list[str], plans: list[str]) -> dict[str, Any]:
        return {
            "case": self.case.name,
            "truth": struck.truth.words,
            "right": right(struck.truth, said),
            "declared_s": round((said.declared - struck.onset) / 1e9, 3) if said else None,
            "time_to_suspect_s": round((said.named - said.declared) / 1e9, 3) if said else None,
            "ranks": list(said.ranks) if said else None,
            "nodes": list(said.nodes) if said else None,
            "category": said.category if said else None,
            "probability": said.probability if said else None,
            "reason": said.reason if said else f"nothing was said within {VERDICT_LIMIT_S:g} s",
            "incident": said.incident if said else None,
            "rungs": plans,
            "innocent": hurt,
        }


def victims(count: int, draw: random.Random) -> list[int]:
    """Ranks that are struck one after the other: on another node each time, as long as there is one.

    Several faults of one node in a short time would be taken for the node's, and rightly so.
    """
    per_node = RANKS // NODES
    order: list[int] = []
    while len(order) < count:
        order += [node * per_node + draw.randrange(per_node) for node in draw.sample(range(NODES), NODES)]
    return order[:count]


def run_case(home: Path, case: Case, args: argparse.Namespace) -> list[dict[str, Any]]:
    draw = random.Random(f"{args.seed}/{case.name}")
    job, rows = Job(home, case, args), list[dict[str, Any]]()
    began = time.monotonic()
    with job.running():
        for number, rank in enumerate(victims(args.trials, draw)):
            try:
                row = job.trial(number, rank, draw)
            except TimeoutError as error:
                print(f"{case.name} {number}: given up: {error}", file=sys.stderr)
                break
            rows.append(row)
            print(f"{case.name} {number}: {tell(row)}", file=sys.stderr)
        if args.keep is not None:
            keep(job, args.keep / case.name)
    print(f"{case.name}: {time.monotonic() - began:.0f} s", file=sys.stderr)
    lost = args.trials - len(rows)
    return [*rows, *(_failed(case) for _ in range(lost))]


def _failed(case: Case) -> dict[str, Any]:
    """A trial for which there was no job any more: as wrong as a wrong name."""
    empty = dict.fromkeys(("declared_s", "time_to_suspect_s", "ranks", "nodes", "category", "probability", "incident"))
    return {"case": case.name, "right": False, "reason": "the job did not come back", "innocent": [], **empty}


def tell(row: dict[str, Any]) -> str:
    verdict = "right" if row["right"] else "WRONG"
    after = "" if row["declared_s"] is None else f" {row['declared_s']:.2f} + {row['time_to_suspect_s']:.2f} s"
    hurt = f"; innocent: {'; '.join(row['innocent'])}" if row["innocent"] else ""
    return f"{verdict}{after}, {row['truth']}: {row['reason']}{hurt} {row['rungs']}"


def keep(job: Job, folder: Path) -> None:
    """What is worth a look afterwards, as a state directory (``keepstep incident i1 --state-dir``)."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copytree(job.cluster.run_dir, folder / "runs" / job.cluster.job, dirs_exist_ok=True)
    for output in job.home.glob("node-*.txt"):
        shutil.copy(output, folder)


def chosen(names: Sequence[str]) -> tuple[list[Case], dict[str, str]]:
    """The cases that can be made here, and why the others cannot."""
    wanted = [case for case in CASES if case.name in names]
    network = missing()
    storage = "" if os.geteuid() == 0 and os.access("/dev/fuse", os.W_OK) else "it needs root and /dev/fuse"
    left_out = {c.name: network for c in wanted if c.network and network}
    left_out |= {c.name: storage for c in wanted if c.storage and storage}
    return [case for case in wanted if case.name not in left_out], left_out


def main() -> int:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [case.name for case in CASES]
    ask.add_argument("--cases", nargs="+", choices=names, default=names)
    ask.add_argument("--trials", type=int, default=5, help="of each case")
    ask.add_argument("--hang-detect", default="3s", help="as of `keepstep run`: auto, or so many seconds")
    ask.add_argument("--flags", nargs="*", default=[], help="further ones of `keepstep run`")
    ask.add_argument("--keep", type=Path, help="folder for each case's state directory")
    ask.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    ask.add_argument("--json", action="store_true")
    args = ask.parse_args()
    end_on_sigterm()
    print(f"seed {args.seed}", file=sys.stderr)

    cases, left_out = chosen(args.cases)
    for name, why in left_out.items():
        print(f"{name}: left out, {why}", file=sys.stderr)
    rows: list[dict[str, Any]] = []
    with scratch() as home:
        for case in cases:
            rows += run_case(home / case.name, case, args)
    found: dict[str, Any] = {"benchmark": "localise", "ranks": RANKS, "nodes": NODES, "seed": args.seed}
    found |= {"hang_detect": args.hang_detect, **summary(rows), "left_out": left_out}
    found["cases"] = {case.name: summary([r for r in rows if r["case"] == case.name]) for case in cases}
    found["wrong"] = [row for row in rows if not row["right"] or row["innocent"]]
    print(json.dumps(found) if args.json else json.dumps(found, indent=2))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # everything has been taken down on the way here
        sys.exit("stopped")
