"""``keepstep demo``: train on four pretended nodes, break them in every way we know, and prove that nothing was lost.

First an undisturbed run, then the same run under faults, then a script with a bug of its own. The proof is the last
line: every loss of every rank equals the undisturbed run's, bit for bit. No GPU, no root, no network.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from rich.console import Console

import keepstep
from keepstep.cli import demo_faults, demo_view
from keepstep.cli.demo_cluster import Cluster, end_on_sigterm
from keepstep.cli.demo_faults import Fault, Outcome
from keepstep.cli.demo_view import View
from keepstep.cli.demo_watch import differences
from keepstep.cli.errors import PreflightError

RANKS = 4
STEPS = 260
PACE_S = 0.04
"""Sleep per step under faults: it changes no number, and leaves room to watch. The undisturbed run does not wait."""
BUG_RANKS = 2
BUG_STEP = 5
START_LIMIT_S = 120.0
RUN_LIMIT_S = 240.0
"""For one whole run; a healthy one takes a fraction of it, even on two busy cores."""
SHOWN_DIFFERENCES = 5


class BugReport(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the script with a bug."""

    ok: bool
    exit_code: int
    category: str
    why: str
    seconds: float


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What the demo found out; with ``--json`` this is all of stdout."""

    schema: str = "keepstep.v1/Demo"
    losses_identical: bool
    steps: int
    ranks: int
    seed: int
    faults: list[Outcome]
    user_exception: BugReport | None
    differences: list[str]
    orphans: list[str]
    wall_s: float

    @property
    def ok(self) -> bool:
        bug_ok = self.user_exception is None or self.user_exception.ok
        return self.losses_identical and bug_ok and not self.orphans and all(o.ok for o in self.faults)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; 0 when every claim held.

    Raises:
        PreflightError: it cannot run here.
    """
    args = parser().parse_args(argv)
    if importlib.util.find_spec("torch") is None:
        raise PreflightError(
            "the demo trains a model, and torch is not installed", help="pip install 'keepstep[torch]'"
        )
    end_on_sigterm()
    script = example()
    home = Path(args.keep).absolute() if args.keep else Path(tempfile.mkdtemp(prefix="keepstep-demo-"))
    chosen = tuple(f for f in demo_faults.SCRIPT if not args.faults or f.name in args.faults)
    with View(quiet=args.json) as view:
        try:
            report = perform(home, script, chosen, view, steps=args.steps, seed=args.seed, bug=not args.no_bug)
        except (TimeoutError, LookupError) as error:
            view.follow(None)
            print(f"error: the demo got stuck: {error}\nhelp: everything it wrote is in {home}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print("stopped", file=sys.stderr)
            return 130
    if args.json:
        print(json.dumps(msgspec.to_builtins(report)))
    else:
        show(report)
    if report.ok and not args.keep:
        shutil.rmtree(home, ignore_errors=True)
    else:
        print(f"logs, losses and the event log are in {home}", file=sys.stderr)
    return 0 if report.ok else 1


def perform(
    home: Path, script: Path, faults: Sequence[Fault], view: View, *, steps: int, seed: int, bug: bool
) -> Report:
    """All acts, in order. Whatever happens, no process of the demo is left."""
    began = time.monotonic()
    words = ("--steps", str(steps), "--seed", str(seed), "--batch", "4")
    environ = clean_environment()
    orphans: list[str] = []
    reference = Cluster(
        home / "reference",
        job="reference",
        script=script,
        args=words,
        nodes=1,
        nproc=RANKS,
        flags=("--standbys", "0"),
        environ=environ,
    )
    view.say(f"undisturbed: {RANKS} ranks train a language model on Python's own source text for {steps} steps")
    try:
        train(reference, view, steps)
    finally:
        orphans += reference.close()
    cluster = Cluster(
        home / "faults",
        job="demo",
        script=script,
        args=(*words, "--pace", str(PACE_S)),
        nodes=RANKS,
        standby_nodes=1,
        flags=("--standbys", "1"),
        environ=environ,
    )
    view.say(f"the same again on {RANKS} nodes and a spare one, under {len(faults)} faults")
    outcomes: list[Outcome] = []
    try:
        cluster.start()
        view.follow(cluster, steps)
        for fault in faults:
            demo_faults.wait_until_ready(cluster, fault, view.tick)
            view.say(f"fault: {fault.title}")
            outcome = demo_faults.play(cluster, fault, view.tick)
            outcomes.append(outcome)
            for line in told(outcome):
                view.say(line)
        expect_success(cluster, cluster.wait(RUN_LIMIT_S, view.tick))
    finally:
        view.follow(None)
        orphans += cluster.close()
    found = differences(cluster.run_dir, reference.run_dir, world_size=RANKS, steps=range(steps))
    return Report(
        losses_identical=not found,
        steps=steps,
        ranks=RANKS,
        seed=seed,
        faults=outcomes,
        user_exception=with_bug(home / "bug", script, view, environ, orphans) if bug else None,
        differences=found[:SHOWN_DIFFERENCES],
        orphans=orphans,
        wall_s=round(time.monotonic() - began, 1),
    )


def train(cluster: Cluster, view: View, steps: int) -> None:
    """Start a job and wait until it is through."""
    cluster.start()
    view.follow(cluster, steps)
    expect_success(cluster, cluster.wait(RUN_LIMIT_S, view.tick))
    view.follow(None)


def expect_success(cluster: Cluster, codes: Mapping[str, int]) -> None:
    if bad := {name: code for name, code in codes.items() if code}:
        raise TimeoutError(f"job {cluster.job} did not finish: exit codes {bad}\n{cluster.tail()}")


def with_bug(home: Path, script: Path, view: View, environ: Mapping[str, str], orphans: list[str]) -> BugReport:
    """A script that raises: retried once, then stopped with its own exit code, and no machine is blamed."""
    view.say("a script with a bug: it must be stopped, not restarted for ever")
    began = time.monotonic()
    cluster = Cluster(
        home,
        job="bug",
        script=script,
        args=("--steps", str(4 * BUG_STEP), "--fail-at", str(BUG_STEP)),
        nodes=1,
        nproc=BUG_RANKS,
        environ=environ,
    )
    try:
        cluster.start()
        code = cluster.wait(RUN_LIMIT_S, view.tick)["node-0"]
    finally:
        orphans += cluster.close()
    exit_report = cluster.exit_report()
    category, why = str(exit_report.get("category", "")), str(exit_report.get("why", ""))
    view.say(f"stopped with the script's own code {code} ({category}): {why}")
    ok = code == 1 and category == "user_code"
    return BugReport(ok=ok, exit_code=code, category=category, why=why, seconds=round(time.monotonic() - began, 1))


def told(outcome: Outcome) -> list[str]:
    return [
        f"  did      {outcome.did}",
        f"  said     {outcome.said}",
        f"  back     after {outcome.total_ms:.0f} ms; {outcome.kept} of {outcome.could_keep} survivors kept their "
        f"processes, {outcome.steps_lost} steps lost",
    ]


def show(report: Report) -> None:
    """The table and the proof, on stdout."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = demo_view.TABLE_WIDTH
    console.print()
    console.print(demo_view.table(report.faults))
    console.print()
    for line in demo_view.phase_lines(report.faults):
        console.print(line, style="dim")
    if report.user_exception is not None:
        bug = report.user_exception
        console.print(f"a script with a bug: exit code {bug.exit_code}, {bug.category}, after {bug.seconds:.0f} s")
    for line in report.differences:
        console.print(f"different: {line}")
    for line in report.orphans:
        console.print(f"left behind: {line}")
    lost = sum(o.steps_lost for o in report.faults)
    console.print(
        f"{len(report.faults)} faults, {lost} steps lost, {report.steps} steps x {report.ranks} ranks compared, "
        f"{report.wall_s:.0f} s in all"
    )
    print(f"losses identical: {'yes' if report.losses_identical else 'no'}", flush=True)


def example() -> Path:
    """The training script: inside an installed package, or in the checkout that it was installed from.

    Raises:
        PreflightError: neither.
    """
    package = Path(keepstep.__file__).parent
    for place in (package / "examples" / "lm" / "train.py", package.parents[1] / "examples" / "lm" / "train.py"):
        if place.is_file():
            return place
    raise PreflightError(f"the demo's training script is missing below {package}", help="install keepstep again")


def clean_environment() -> dict[str, str]:
    """Ours, without what an outer job or torchrun left in it."""
    names = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"}
    outer = ("KEEPSTEP_", "PET_", "TORCHELASTIC_", "ROLE_")
    return {k: v for k, v in os.environ.items() if k not in names and not k.startswith(outer)}


def parser() -> argparse.ArgumentParser:
    ask = argparse.ArgumentParser(prog="keepstep demo", description=__doc__)
    ask.add_argument("--json", action="store_true", help="only the report, as one JSON object on stdout")
    ask.add_argument("--steps", type=int, default=STEPS, help=f"steps to train ({STEPS})")
    ask.add_argument("--seed", type=int, default=1)
    names = [fault.name for fault in demo_faults.SCRIPT]
    ask.add_argument("--faults", nargs="*", choices=names, help="only these (all)")
    ask.add_argument("--no-bug", action="store_true", help="leave out the script that raises")
    ask.add_argument("--keep", metavar="DIR", help="write everything there and leave it")
    return ask


if __name__ == "__main__":
    sys.exit(main())
