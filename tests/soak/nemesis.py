"""What is done to the living job: faults that it has to survive, and pauses that must alarm nobody.

Each is watched until every rank trains again. Times are by our own clock, from the blow to two new steps of the
slowest rank; what the job itself says of an incident is read from its log.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from tests.soak.deck import Deck
from tests.soak.flap import link_down

from keepstep.cli.client import Api
from keepstep.cli.demo_cluster import Cluster
from keepstep.cli.errors import DoorError, NotFound, Unreachable

WORLD = 4
RECOVERY_LIMIT_S = 120.0
READY_LIMIT_S = 60.0
LEAVE_LIMIT_S = 30.0
PAUSE_LIMIT_S = 60.0
SLOW_S = 3.0
GARBAGE_S = 1.5
INTERPRETER_S = 2.0
EVALUATION_S = (3.0, 5.0)
FLAP_S = 3.0
STILL_SHARE = 0.7
"""Of the ordered seconds: the job has to stand still that long at a stretch, or there was no pause."""

FAULTS = {
    "kill": 6,
    "freeze": 3,
    "node": 2,
    "controller": 3,
    "agent": 2,
    "keeper": 2,
    "shim": 2,
    "store": 3,
    "kill during recovery": 4,
}
PAUSES = {"slow batch": 2, "garbage collection": 2, "interpreter held": 1, "evaluation": 2, "link flap": 2}


class Blow(msgspec.Struct, kw_only=True):
    """One fault or pause, and what it cost."""

    kind: str
    victims: set[int] = set()
    recover_ms: float = 0.0
    detect_ms: list[float] = []
    incidents: list[str] = []
    strangers: list[str] = []
    """Ranks that were not hit and yet have another process afterwards."""


class Nemesis:
    """Draws faults and pauses from a seed and carries them out.

    Args:
        orders: the file that the training script reads its pauses from.
        flaps: whether the link is ours to cut.
    """

    def __init__(self, cluster: Cluster, seed: int, *, orders: Path, flaps: bool) -> None:
        self.cluster, self.random = cluster, random.Random(seed)
        self.faults = Deck(FAULTS, self.random)
        self.pauses = Deck({k: w for k, w in PAUSES.items() if flaps or k != "link flap"}, self.random)
        self.blows: list[Blow] = []
        self.facts_failed: dict[int, int] = {}
        """By the controller's process id; the newest count that was seen of each."""
        self._orders, self._order = orders, 0
        self.retired = 0
        self._spares = 0
        self._struck, self._top = 0.0, 0
        self._acts: dict[str, Callable[[], set[int]]] = {
            "kill": self.kill,
            "freeze": self.freeze,
            "node": self.node,
            "controller": self.controller,
            "agent": lambda: self.role("agent"),
            "keeper": lambda: self.role("keeper"),
            "shim": lambda: self.role("shim"),
            "store": self.store,
            "kill during recovery": self.twice,
            "slow batch": self.slow,
            "garbage collection": self.garbage,
            "interpreter held": self.interpreter,
            "evaluation": self.evaluation,
            "link flap": self.flap,
        }

    def strike(self) -> Blow:
        """One fault, then wait until every rank trains again."""
        return self._deal(self.faults.draw())

    def rest(self) -> Blow:
        """One pause, then wait until every rank trains again."""
        return self._deal(self.pauses.draw())

    def _deal(self, kind: str) -> Blow:
        known, before = set(self.cluster.watch.incidents), self.pids()
        victims = self._acts[kind]()
        blow = Blow(kind=kind, victims=victims)
        goal = self._top + 2
        self.cluster.until(lambda: self.cluster.floor() >= goal, RECOVERY_LIMIT_S, f"training to go on after {kind}")
        blow.recover_ms = (time.monotonic() - self._struck) * 1000
        self.cluster.until(self.cluster.watch.settled, RECOVERY_LIMIT_S, f"calm after {kind}")
        now = self.pids()
        blow.strangers = [f"rank {r} after {kind}" for r in before if r not in victims and now.get(r) != before[r]]
        blow.incidents = [name for name in self.cluster.watch.incidents if name not in known]
        blow.detect_ms = [m.detect_ms for n in blow.incidents if (m := self.cluster.watch.incidents[n].measured)]
        self.blows.append(blow)
        self.look_at_controller()
        self.refill()
        return blow

    def refill(self) -> None:
        """What operators do: a node that the job has put aside (three faults in ten minutes) leaves, another one comes.

        The first node stays whatever is thought of it: its launcher holds the controller.
        """
        for name in self.cluster.watch.quarantined & self.cluster.nodes.keys() - {"node-0"}:
            node = self.cluster.nodes[name]
            if not node.lost:
                node.lost = True
                node.launcher.send_signal(signal.SIGTERM)
                self.cluster.until(lambda: node.launcher.poll() is not None, LEAVE_LIMIT_S, f"{name} to leave")  # noqa: B023
                self.retired += 1
        away = self.cluster.watch.quarantined | {n.name for n in self.cluster.nodes.values() if n.lost}
        if not self.cluster.nodes.keys() - away - set(self.seats().values()):
            self.add_standby_node()

    def add_standby_node(self) -> None:
        self._spares += 1
        self.cluster.add_node(f"again-{self._spares}", standby=True)

    # ------------------------------------------------------------ looking

    def pids(self) -> dict[int, int]:
        return {rank: beat.pid for rank, beat in self.cluster.beats().items()}

    def seats(self) -> dict[int, str]:
        return {rank: self.cluster.node_of(rank) for rank in range(WORLD)}

    def rank(self) -> int:
        return self.random.randrange(WORLD)

    def api(self) -> Api:
        address = json.loads((self.cluster.run_dir / "controller.json").read_bytes())
        return Api(address["host"], int(address["http_port"]), token_file=address.get("token_file") or "")

    def look_at_controller(self) -> None:
        """Facts that its mind could not digest; a controller that is just starting is asked the next time."""
        try:
            pid = self.cluster.controller_pid()
            self.facts_failed[pid] = self.api().get("status")["controller"]["facts_failed"]
        except (LookupError, OSError, Unreachable, NotFound, DoorError):
            return

    def _now(self) -> None:
        """The blow falls: from here on time and steps count."""
        self._struck, self._top = time.monotonic(), max(self.cluster.steps().values(), default=0)

    # ------------------------------------------------------------ faults

    def kill(self) -> set[int]:
        rank = self.rank()
        self._now()
        self.cluster.kill_rank(rank)
        return {rank}

    def freeze(self) -> set[int]:
        rank = self.rank()
        self._now()
        self.cluster.freeze_rank(rank)
        return {rank}

    def node(self) -> set[int]:
        """Never the first node: its launcher holds the controller, and there is only one. The lost node's launcher is
        started again as a fresh standby node, so that the next loss finds one as well."""
        seats = self.seats()
        name = self.random.choice(sorted(set(seats.values()) - {"node-0"}))
        self.cluster.until(
            lambda: any(node not in seats.values() for node, _ in self.cluster.watch.parked),
            READY_LIMIT_S,
            "a standby node with a warm process",
        )
        self._now()
        self.cluster.lose_node(name)
        self.add_standby_node()
        return {rank for rank, node in seats.items() if node == name}

    def controller(self) -> set[int]:
        """Half of the time a rank dies while there is no controller: a deputy has to act."""
        self.look_at_controller()
        self._now()
        self.cluster.kill_controller()
        return self._kill_perhaps()

    def store(self) -> set[int]:
        """Half of the time a rank dies before the next store is known.

        A store that was killed stays the present epoch's, dead and unused; then a rank dies, so that another is needed.
        """
        self._now()
        try:
            self.cluster.kill_store()
        except LookupError:
            return self.kill()
        return self._kill_perhaps()

    def _kill_perhaps(self) -> set[int]:
        if self.random.random() < 0.5:
            return set()
        rank = self.rank()
        self.cluster.kill_rank(rank)
        return {rank}

    def role(self, role: str) -> set[int]:
        node = self.cluster.node_of(self.rank())
        self.cluster.until(lambda: self.cluster.role_pid(node, role) is not None, READY_LIMIT_S, f"{role} on {node}")
        self._now()
        self.cluster.kill_role(node, role)
        return set()

    def twice(self) -> set[int]:
        """A second rank dies up to half a second after the first, or the moment that its recovery has begun."""
        first, second = self.random.sample(range(WORLD), 2)
        wait_s = self.random.random() * 0.5
        epoch = self.epoch()
        self._now()
        self.cluster.kill_rank(first)
        self.cluster.until(
            lambda: time.monotonic() > self._struck + wait_s or self.epoch() > epoch,
            RECOVERY_LIMIT_S,
            "the recovery to begin",
        )
        self.cluster.kill_rank(second)
        return {first, second}

    def epoch(self) -> int:
        return self.cluster.watch.roster.epoch if self.cluster.watch.roster else 0

    # ------------------------------------------------------------ pauses

    def slow(self) -> set[int]:
        """One rank sleeps in its step: not frozen, so the job must simply wait."""
        rank = self.rank()
        self._now()
        self.cluster.until(lambda: self._ordered_slow(rank), READY_LIMIT_S, "a controller that takes orders")
        return self._stood_still(SLOW_S)

    def _ordered_slow(self, rank: int) -> bool:
        """Give the order; ``False`` while a killed controller is not back yet."""
        body = {"fault": "slow", "rank": rank, "seconds": SLOW_S, "by": "soak"}
        try:
            self.api().post("jobs", self.cluster.job, "inject", body=body)
        except (OSError, Unreachable):
            return False
        return True

    def garbage(self) -> set[int]:
        return self._order_pause("garbage", [self.rank()], GARBAGE_S)

    def interpreter(self) -> set[int]:
        return self._order_pause("interpreter", [self.rank()], INTERPRETER_S)

    def evaluation(self) -> set[int]:
        ranks = list(range(WORLD)) if self.random.random() < 0.5 else [self.rank()]
        return self._order_pause("evaluation", ranks, self.random.uniform(*EVALUATION_S))

    def flap(self) -> set[int]:
        self._now()
        with link_down():
            up = time.monotonic() + FLAP_S
            self.cluster.until(lambda: time.monotonic() > up, FLAP_S * 2, "the flap to pass")
        self._top = max(self._top, max(self.cluster.steps().values(), default=0))
        return set()

    def _order_pause(self, kind: str, ranks: list[int], seconds: float) -> set[int]:
        self._order += 1
        draft = self._orders.with_suffix(".new")
        draft.write_text(json.dumps({"number": self._order, "kind": kind, "ranks": ranks, "seconds": seconds}))
        self._now()
        os.replace(draft, self._orders)
        return self._stood_still(seconds)

    def _stood_still(self, seconds: float) -> set[int]:
        """Wait until no rank has moved for that long: a pause that did not happen proves nothing."""
        last: dict[int, int] = {}
        since = time.monotonic()

        def still() -> bool:
            nonlocal last, since
            if (steps := self.cluster.steps()) != last:
                last, since = steps, time.monotonic()
            return time.monotonic() - since > STILL_SHARE * seconds

        self.cluster.until(still, PAUSE_LIMIT_S, f"the job to stand still for {STILL_SHARE * seconds:.1f} s")
        self._top = max(last.values(), default=0)
        return set()
