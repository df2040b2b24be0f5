"""Random faults on a living job for many minutes, and the proof afterwards that nothing was lost.

    python tests/soak/soak.py --minutes 10 --seed 7 --json

Every 5 to 15 seconds something happens, drawn from the seed: a rank is killed or frozen, a node is lost (and another
one comes), the controller, an agent, a keeper, a fork server or the rendezvous store is killed, a second rank is killed
while the first is being recovered, or a rank pauses for three seconds, which must alarm nobody. At the end: zero steps
lost, every loss equal to an undisturbed run's, no process left behind, no incident stuck, and a log that folds to one
state.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.acceptance.checks import assert_log_folds_to_one_state  # noqa: E402

from keepstep.cli.demo import clean_environment  # noqa: E402
from keepstep.cli.demo_cluster import Cluster  # noqa: E402
from keepstep.cli.demo_watch import differences  # noqa: E402

SCRIPT = ROOT / "tests" / "acceptance" / "small_train.py"
WORLD, NODES = 4, 4
PACE_S = 0.05
PAUSE_S = 3.0
RECOVERY_LIMIT_S = 120.0
MANY_STEPS = 10_000_000
REFERENCE_LIMIT_S = 1800.0


class Nemesis:
    """Draws faults from a seed and carries them out; counts what the job has survived."""

    def __init__(self, cluster: Cluster, seed: int) -> None:
        self.cluster, self.random = cluster, random.Random(seed)
        self.survived: Counter[str] = Counter()
        self.false_alarms = 0
        self._spares = 0
        self.menu: list[tuple[int, str, Callable[[], None]]] = [
            (6, "kill", self.kill),
            (3, "freeze", self.freeze),
            (2, "node", self.node),
            (3, "controller", self.controller),
            (2, "agent", self.agent),
            (2, "keeper", self.keeper),
            (1, "shim", self.shim),
            (2, "store", self.store),
            (4, "kill during recovery", self.twice),
            (3, "pause", self.pause),
        ]

    def strike(self) -> str:
        """One fault, then wait until every rank trains again."""
        weights = [weight for weight, _, _ in self.menu]
        _, name, act = self.random.choices(self.menu, weights)[0]
        top = max(self.cluster.steps().values(), default=0)
        act()
        self.cluster.until(lambda: self.cluster.floor() > top + 2, RECOVERY_LIMIT_S, f"training to go on after {name}")
        self.cluster.until(self.cluster.watch.settled, RECOVERY_LIMIT_S, f"calm after {name}")
        self.survived[name] += 1
        return name

    def rank(self) -> int:
        return self.random.randrange(WORLD)

    def home(self) -> str:
        return self.cluster.node_of(self.rank())

    def kill(self) -> None:
        self.cluster.kill_rank(self.rank())

    def freeze(self) -> None:
        self.cluster.freeze_rank(self.rank())

    def node(self) -> None:
        """Never the first node: its launcher holds the controller, and there is only one."""
        name = self.random.choice([n for n in {self.cluster.node_of(r) for r in range(WORLD)} if n != "node-0"] or [""])
        if name:
            self.cluster.lose_node(name)
            self._spares += 1
            self.cluster.add_node(f"again-{self._spares}", standby=True)

    def controller(self) -> None:
        self.cluster.kill_controller()
        if self.random.random() < 0.5:
            self.kill()

    def role(self, role: str) -> None:
        node = self.home()
        self.cluster.until(lambda: self.cluster.role_pid(node, role) is not None, 30, f"{role} on {node}")
        self.cluster.kill_role(node, role)

    def agent(self) -> None:
        self.role("agent")

    def keeper(self) -> None:
        self.role("keeper")

    def shim(self) -> None:
        self.role("shim")

    def store(self) -> None:
        self.cluster.kill_store()
        if self.random.random() < 0.5:
            self.kill()

    def twice(self) -> None:
        first, second = self.random.sample(range(WORLD), 2)
        epoch = self.cluster.watch.roster.epoch if self.cluster.watch.roster else 0
        self.cluster.kill_rank(first)
        wait = self.random.random() * 0.5
        deadline = time.monotonic() + wait
        self.cluster.until(
            lambda: (
                time.monotonic() > deadline
                or bool(self.cluster.watch.roster and self.cluster.watch.roster.epoch > epoch)
            ),
            RECOVERY_LIMIT_S,
            "the recovery to begin",
        )
        self.cluster.kill_rank(second)

    def pause(self) -> None:
        """Three slow seconds of one rank: sleeping, not frozen, so the job must simply wait."""
        before = len(self.cluster.watch.incidents)
        self.cluster.pause_rank(self.rank(), PAUSE_S)
        self.false_alarms += len(self.cluster.watch.incidents) - before


def reference(home: Path, steps: int) -> Path:
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


def soak(home: Path, minutes: float, seed: int) -> dict[str, object]:
    cluster = Cluster(
        home / "soak", job="soak", script=SCRIPT, args=("--steps", str(MANY_STEPS), "--pace", str(PACE_S)), nodes=NODES,
        standby_nodes=1, flags=("--standbys", "1", "--allow-inject", "--max-restarts", "0"),
        environ=clean_environment(),
    )  # fmt: skip
    nemesis = Nemesis(cluster, seed)
    stuck = ""
    steps = 0
    try:
        cluster.start()
        cluster.until(cluster.watch.settled, RECOVERY_LIMIT_S, "the job to start")
        end = time.monotonic() + minutes * 60
        while time.monotonic() < end:
            calm = time.monotonic() + nemesis.random.uniform(5, 15)
            cluster.until(lambda: time.monotonic() > calm, 30, "calm")  # noqa: B023
            name = nemesis.strike()
            print(f"{end - time.monotonic():6.0f} s left  survived {name}, step {cluster.floor()}", file=sys.stderr)
        steps = cluster.floor()
    except (TimeoutError, LookupError) as error:
        stuck = str(error)
        steps = min(cluster.steps().values(), default=0)
    finally:
        orphans = cluster.close()
    measured = [i.measured for i in cluster.watch.incidents.values() if i.measured is not None]
    different = (
        differences(cluster.run_dir, reference(home, steps), world_size=WORLD, steps=range(steps)) if steps else []
    )
    assert_log_folds_to_one_state(cluster.run_dir)
    return {
        "seed": seed,
        "minutes": minutes,
        "survived": sum(nemesis.survived.values()),
        "faults": dict(nemesis.survived),
        "steps": steps,
        "steps_lost": sum(m.steps_lost for m in measured),
        "losses_identical": bool(steps) and not different,
        "different": different[:5],
        "incidents": len(cluster.watch.incidents),
        "stuck": stuck or [i.id for i in cluster.watch.incidents.values() if not i.over],
        "false_alarms": nemesis.false_alarms,
        "orphans": orphans,
    }


def main() -> int:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--minutes", type=float, default=10.0)
    ask.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    ask.add_argument("--json", action="store_true")
    args = ask.parse_args()
    print(f"seed {args.seed}", file=sys.stderr)
    home = Path(tempfile.mkdtemp(prefix="keepstep-soak-"))
    found = soak(home, args.minutes, args.seed)
    ok = (
        found["losses_identical"]
        and not found["steps_lost"]
        and not found["stuck"]
        and not found["orphans"]
        and not found["false_alarms"]
    )
    print(json.dumps(found) if args.json else json.dumps(found, indent=2))
    if ok:
        shutil.rmtree(home, ignore_errors=True)
    else:
        print(f"logs are in {home}", file=sys.stderr)
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
