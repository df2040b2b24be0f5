"""Random faults on a living job for many minutes, and the proof afterwards that nothing was lost.

    python tests/soak/soak.py --minutes 10 --seed 7 --json

Every 5 to 15 seconds (later where the job still recovers) a fault strikes, drawn from the seed: a rank is killed or
frozen, a node is lost and comes back as a standby, the controller, an agent, a keeper, a fork server or the rendezvous
store is killed, a second rank is killed while the first is being recovered. In between come pauses that must alarm
nobody: a slow batch, a long garbage collection, a held interpreter lock, an evaluation, a link that is down for three
seconds. Whatever was not hit keeps its process. At the end: zero steps lost, every loss equal to an undisturbed run's,
no process left behind, no incident stuck, and a log that folds to one state.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.acceptance.checks import assert_log_folds_to_one_state  # noqa: E402
from tests.soak.flap import enter_namespace  # noqa: E402
from tests.soak.nemesis import FAULTS, PAUSES, RECOVERY_LIMIT_S, WORLD, Blow, Nemesis  # noqa: E402

from keepstep.cli.demo import clean_environment  # noqa: E402
from keepstep.cli.demo_cluster import Cluster, end_on_sigterm  # noqa: E402
from keepstep.cli.demo_watch import Watch, differences  # noqa: E402

SCRIPT = Path(__file__).with_name("train.py")
NODES = 4
PACE_S = 0.05
GAP_S = (5.0, 15.0)
"""From one fault to the next."""
PAUSE_SHARE = 0.6
"""Of the gaps between two faults that have a pause in them."""
MANY_STEPS = 10_000_000
REFERENCE_LIMIT_S = 1800.0
INSIDE = "--in-own-namespace"


def reference(home: Path, steps: int) -> Path:
    """The same training, undisturbed, on one node."""
    cluster = Cluster(
        home, job="reference", script=SCRIPT, args=("--steps", str(steps)), nodes=1, nproc=WORLD,
        flags=("--standbys", "0"), environ=clean_environment(),
    )  # fmt: skip
    try:
        cluster.start()
        codes = cluster.wait(REFERENCE_LIMIT_S)
        assert codes == {"node-0": 0}, cluster.tail()
    finally:
        cluster.close()
    return cluster.run_dir


def torment(cluster: Cluster, nemesis: Nemesis, minutes: float) -> int:
    """Faults and pauses until time is up.

    Returns:
        Steps that every rank had committed then.

    Raises:
        TimeoutError: the job did not come back.
        LookupError: something that has to be there was not.
    """
    cluster.start()
    cluster.until(cluster.watch.settled, RECOVERY_LIMIT_S, "the job to start")
    end = time.monotonic() + minutes * 60
    due = time.monotonic() + nemesis.random.uniform(*GAP_S)
    while time.monotonic() < end:
        if nemesis.random.random() < PAUSE_SHARE:
            told(nemesis.rest(), cluster, end)
        moment = due
        cluster.until(lambda: time.monotonic() > moment, GAP_S[1] * 2, "the next fault")  # noqa: B023
        due = time.monotonic() + nemesis.random.uniform(*GAP_S)
        told(nemesis.strike(), cluster, end)
    return cluster.floor()


def told(blow: Blow, cluster: Cluster, end: float) -> None:
    print(
        f"{end - time.monotonic():6.0f} s left  {blow.kind}: trains again after {blow.recover_ms:.0f} ms, "
        f"step {cluster.floor()}, incidents {blow.incidents}",
        file=sys.stderr,
        flush=True,
    )


def milliseconds(values: Iterable[float]) -> dict[str, float]:
    known = list(values)
    return {"median": round(statistics.median(known), 1), "max": round(max(known), 1)} if known else {}


def summary(blows: list[Blow], watch: Watch) -> dict[str, object]:
    """What the blows tell: counts, times, and alarms that nobody had given a reason for."""
    faults, pauses = [b for b in blows if b.kind in FAULTS], [b for b in blows if b.kind in PAUSES]
    explained = {name for blow in faults if blow.victims for name in blow.incidents}
    measured = [i.measured for i in watch.incidents.values() if i.measured is not None]
    return {
        "survived": len(faults),
        "faults": dict(Counter(b.kind for b in faults)),
        "pauses": dict(Counter(b.kind for b in pauses)),
        "recover_ms": {k: milliseconds(b.recover_ms for b in faults if b.kind == k) for k in FAULTS},
        "detect_ms": {k: milliseconds(ms for b in faults if b.kind == k for ms in b.detect_ms) for k in FAULTS},
        "pause_ms": {k: milliseconds(b.recover_ms for b in pauses if b.kind == k) for k in PAUSES},
        "incidents": len(watch.incidents),
        "false_alarms": [f"{i.id}: {i.title}" for i in watch.incidents.values() if i.id not in explained],
        "missed": [b.kind for b in faults if b.victims and not b.incidents],
        "bystanders_replaced": [who for b in blows for who in b.strangers],
        "steps_lost": sum(m.steps_lost for m in measured),
        "escalated": [i.id for i in watch.incidents.values() if i.state == "ESCALATED"],
        "stuck_incidents": [i.id for i in watch.incidents.values() if not i.over],
    }


def soak(home: Path, minutes: float, seed: int, no_flaps: str) -> dict[str, object]:
    home.mkdir(parents=True, exist_ok=True)
    orders = home / "pause.json"
    cluster = Cluster(
        home / "soak", job="soak", script=SCRIPT,
        args=("--steps", str(MANY_STEPS), "--pace", str(PACE_S), "--pauses", str(orders)), nodes=NODES,
        standby_nodes=1, flags=("--standbys", "1", "--allow-inject", "--max-restarts", "0"),
        environ=clean_environment(),
    )  # fmt: skip
    nemesis = Nemesis(cluster, seed, orders=orders, flaps=not no_flaps)
    given_up = ""
    try:
        steps = torment(cluster, nemesis, minutes)
    except (TimeoutError, LookupError, OSError) as error:
        print(error, file=sys.stderr)
        given_up = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        steps = min(cluster.steps().values(), default=0)
    finally:
        nemesis.look_at_controller()
        # Before the end: that the launchers are told to leave, one after the other, is no fault of the job.
        told_by_blows = summary(nemesis.blows, cluster.watch)
        orphans = cluster.close()
    different = ["no step was made"]
    if steps:
        different = differences(cluster.run_dir, reference(home, steps), world_size=WORLD, steps=range(steps))
    try:
        assert_log_folds_to_one_state(cluster.run_dir)
        folds = True
    except AssertionError as error:
        print(f"log: {error}", file=sys.stderr)
        folds = False
    return {
        "seed": seed,
        "minutes": minutes,
        "steps": steps,
        **told_by_blows,
        "losses_identical": not different,
        "different": different[:5],
        "orphans": orphans,
        "log_folds_equal": folds,
        "facts_failed": sum(nemesis.facts_failed.values()),
        "nodes_retired": nemesis.retired,
        "link_flap": f"not possible here: {no_flaps}" if no_flaps else f"{nemesis.pauses.drawn['link flap']} times",
        "given_up": given_up,
    }


def broken_promises(found: dict[str, object]) -> list[str]:
    """Names of what was not as promised: everything that has to be empty, zero or true."""
    empty = ("steps_lost", "stuck_incidents", "escalated", "orphans", "false_alarms", "missed", "bystanders_replaced")
    wrong = [name for name in (*empty, "facts_failed", "given_up") if found[name]]
    return wrong + [name for name in ("losses_identical", "log_folds_equal") if not found[name]]


def main() -> int:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--minutes", type=float, default=10.0)
    ask.add_argument("--seed", type=int)
    ask.add_argument("--json", action="store_true", help="the report on one line")
    ask.add_argument(INSIDE, action="store_true", help=argparse.SUPPRESS)
    args = ask.parse_args()
    end_on_sigterm()
    no_flaps = enter_namespace(INSIDE, sys.argv)
    seed = random.SystemRandom().randrange(10**6) if args.seed is None else args.seed
    print(f"seed {seed}" + (f", no link flaps: {no_flaps}" if no_flaps else ""), file=sys.stderr, flush=True)
    home = Path(tempfile.mkdtemp(prefix="keepstep-soak-"))
    found = soak(home, args.minutes, seed, no_flaps)
    broken = broken_promises(found)
    print(json.dumps(found | {"broken": broken}, indent=None if args.json else 2))
    if broken:
        print(f"not as promised: {', '.join(broken)}; logs are in {home}", file=sys.stderr)
        return 1
    shutil.rmtree(home, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
