"""Whether replay names the faulty machine, how soon, and how often it is wrong: simulated, 24 to 1,200 machines.

    python -m benchmarks.replay --json

*constant*: one machine breaks every group that it runs in; every position of every size is tried, by the two phases
and by the search. *rare*: one machine breaks two runs of a hundred; a search counts as a success if it names that
machine, and nobody else, within the rounds that the forecast states. *two*: a pair of machines at once; a success is
the exact pair (constant), or the exact set where one or two are equally probable (rare). *calibration*: as many faulty
machines as the prior draws, none among them, with false alarms; a verdict is right if whom it convicts is faulty.
Rounds are runs of all groups side by side. Intervals are Wilson's, 95 %.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from keepstep.core.locate.replay import Phase, plan, read
from keepstep.core.locate.replay_forecast import Play, Played, forecast, rehearse
from keepstep.core.locate.replay_posterior import Prior
from keepstep.core.locate.replay_search import Terms, open_search
from keepstep.model.ids import NodeId

SIZES = (24, 96, 384, 1200)
RATE = 0.02
"""Diverging runs of a known-bad GPU: 1 in 50 (AEGIS, OSDI '26)."""
CONFIDENCE = 0.95
ONE_OR_TWO = (0.0, 0.5, 0.5)
CALIBRATED = Prior(rates=((RATE, 1.0),), false_alarm=1e-4, faults=(0.2, 0.6, 0.15, 0.05))
CALIBRATION_MACHINES = 96
PLAN_S = 1.0
"""Bound on the time to plan both phases, and to work out one step of the largest search."""
CONSTANT_ROUNDS = 2
TWO_CONSTANT_ROUNDS = 4
WILSON_Z = 1.96


def main() -> int:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--machines", type=int, nargs="+", default=list(SIZES))
    ask.add_argument("--trials", type=int, default=200, help="searches of each kind and size")
    ask.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    ask.add_argument("--json", action="store_true")
    args = ask.parse_args()
    print(f"seed {args.seed}", file=sys.stderr)
    found = report(args.machines, args.trials, args.seed)
    print(json.dumps(found) if args.json else json.dumps(found, indent=2))
    return 0 if all(found["within"].values()) else 1


def report(sizes: Sequence[int], trials: int, seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    by_size = {str(count): _size(count, trials, rng) for count in sizes}
    found: dict[str, Any] = {
        "benchmark": "replay",
        "seed": seed,
        "trials": trials,
        "hit_rate": RATE,
        "confidence": CONFIDENCE,
        "machines": by_size,
        "calibration": calibration(2 * trials, rng),
    }
    found["within"] = within(found)
    return found


def _size(count: int, trials: int, rng: random.Random) -> dict[str, Any]:
    machines = [NodeId(f"n{index}") for index in range(count)]
    return {
        "constant": constant(machines),
        "rare": rare(machines, trials, rng),
        "two_constant": two_constant(machines, trials, rng),
        "two_rare": two_rare(machines, trials // 2, rng),
    }


def constant(machines: Sequence[NodeId]) -> dict[str, Any]:
    """Every position: by the crossing of two phases, and by the search with a prior that also knows rare faults."""
    began = time.perf_counter()
    made = plan(machines, size=math.isqrt(len(machines)))
    plan_s = time.perf_counter() - began
    crossed = sum(
        read(made.phases, [_home(phase, [guilty]) for phase in made.phases]).suspects == (guilty,)
        for guilty in machines
    )
    start = open_search(machines, Terms(), Prior())
    searched, rounds = 0, 0
    began = time.perf_counter()
    for guilty in machines:
        _, verdict = rehearse(start, machine_room([guilty], 1.0, random.Random(0)))
        searched += verdict.machines == (guilty,)
        rounds = max(rounds, verdict.rounds)
    return {
        "positions": len(machines),
        "found_by_two_phases": crossed,
        "found_by_search": searched,
        "most_rounds": rounds,
        "plan_s": round(plan_s, 4),
        "search_s": round((time.perf_counter() - began) / len(machines), 4),
    }


def rare(machines: Sequence[NodeId], trials: int, rng: random.Random) -> dict[str, Any]:
    """One machine at the hit rate, within the stated rounds."""
    stated = forecast(machines, Terms(), Prior(rates=((RATE, 1.0),)), rate=RATE)
    start = open_search(machines, Terms(most_rounds=stated.rounds), Prior(rates=((RATE, 1.0),), faults=(0.0, 1.0)))
    right = wrong = 0
    rounds: list[int] = []
    for _ in range(trials):
        guilty = rng.choice(machines)
        _, verdict = rehearse(start, machine_room([guilty], RATE, rng), lucks(len(machines), rng))
        right += verdict.kind == "found" and verdict.machines == (guilty,)
        wrong += verdict.kind == "found" and verdict.machines != (guilty,)
        rounds.append(verdict.rounds)
    return {
        "stated_rounds": stated.rounds,
        "expected_rounds": round(stated.expected_rounds, 1),
        "rounds_of_fixed_repeats": stated.fixed_rounds,
        "mean_rounds": round(statistics.mean(rounds), 1),
        **share(right, trials),
        "convicted_an_innocent": wrong,
    }


def two_constant(machines: Sequence[NodeId], trials: int, rng: random.Random) -> dict[str, Any]:
    start = open_search(machines, Terms(everyone=True), Prior())
    right, rounds = 0, 0
    for _ in range(trials):
        guilty = rng.sample(machines, 2)
        _, verdict = rehearse(start, machine_room(guilty, 1.0, rng), lucks(len(machines), rng))
        right += set(verdict.machines) == set(guilty)
        rounds = max(rounds, verdict.rounds)
    return {**share(right, trials), "most_rounds": rounds}


def two_rare(machines: Sequence[NodeId], trials: int, rng: random.Random) -> dict[str, Any]:
    start = open_search(machines, Terms(everyone=True), Prior(rates=((RATE, 1.0),), faults=ONE_OR_TWO))
    right = pairs = both = 0
    rounds: list[int] = []
    for _ in range(trials):
        guilty = set(rng.sample(machines, rng.choice((1, 2))))
        _, verdict = rehearse(start, machine_room(guilty, RATE, rng), lucks(len(machines), rng))
        right += set(verdict.machines) == guilty
        pairs += len(guilty) == 2
        both += len(guilty) == 2 and set(verdict.machines) == guilty
        rounds.append(verdict.rounds)
    return {
        **share(right, trials),
        "pairs": pairs,
        "pairs_found": both,
        "mean_rounds": round(statistics.mean(rounds), 1),
        "most_rounds": max(rounds),
    }


def calibration(trials: int, rng: random.Random) -> dict[str, Any]:
    """Of the verdicts that a search gives at 95 %, the share that is right."""
    machines = [NodeId(f"n{index}") for index in range(CALIBRATION_MACHINES)]
    start = open_search(machines, Terms(), CALIBRATED)
    right = verdicts = 0
    for _ in range(trials):
        guilty = set(rng.sample(machines, rng.choices(range(4), CALIBRATED.faults)[0]))
        play = machine_room(guilty, RATE, rng, CALIBRATED.false_alarm)
        _, verdict = rehearse(start, play, lucks(len(machines), rng))
        if verdict.kind in ("found", "nobody"):
            verdicts += 1
            right += set(verdict.machines) <= guilty if verdict.kind == "found" else not guilty
    return {"machines": CALIBRATION_MACHINES, "searches": trials, **share(right, verdicts)}


def machine_room(guilty: Collection[NodeId], rate: float, rng: random.Random, false_alarm: float = 0.0) -> Play:
    """Machines of which the guilty ones break the group that they run in, each run with this probability."""

    def play(phase: Phase, repeats: int) -> Played:
        homes = [index for index, group in enumerate(phase.groups) for machine in group if machine in guilty]
        alarms = range(len(phase.groups)) if false_alarm else ()
        for clean in range(repeats):
            failed = {index for index in homes if rng.random() < rate}
            failed |= {index for index in alarms if rng.random() < false_alarm}
            if failed:
                return Played(clean=clean, failed=tuple(sorted(failed)))
        return Played(clean=repeats)

    return play


def lucks(count: int, rng: random.Random) -> Iterator[list[float]]:
    while True:
        yield [rng.random() for _ in range(count)]


def share(right: int, of: int) -> dict[str, Any]:
    """A success rate with its interval."""
    rate = right / of
    middle = (rate + WILSON_Z**2 / (2 * of)) / (1 + WILSON_Z**2 / of)
    half = WILSON_Z / (1 + WILSON_Z**2 / of) * math.sqrt(rate * (1 - rate) / of + WILSON_Z**2 / (4 * of * of))
    return {
        "of": of,
        "right": right,
        "success_rate": round(rate, 4),
        "interval": [round(middle - half, 4), round(min(1.0, middle + half), 4)],
    }


def within(found: dict[str, Any]) -> dict[str, bool]:
    """The bounds that this run has to keep: rates may miss theirs by what the sample leaves open, and not by more."""
    sizes = found["machines"].values()
    return {
        "constant_always_found": all(
            s["constant"]["positions"] == s["constant"]["found_by_two_phases"] == s["constant"]["found_by_search"]
            for s in sizes
        ),
        "constant_in_two_rounds": all(s["constant"]["most_rounds"] <= CONSTANT_ROUNDS for s in sizes),
        "rare_found_in_stated_rounds": all(s["rare"]["interval"][1] >= CONFIDENCE for s in sizes),
        "rare_sooner_than_fixed_repeats": all(
            s["rare"]["stated_rounds"] < s["rare"]["rounds_of_fixed_repeats"] for s in sizes
        ),
        "two_constant_always_found": all(
            s["two_constant"]["success_rate"] == 1.0 and s["two_constant"]["most_rounds"] <= TWO_CONSTANT_ROUNDS
            for s in sizes
        ),
        "two_rare_found": all(s["two_rare"]["interval"][1] >= CONFIDENCE for s in sizes),
        "calibrated": found["calibration"]["interval"][1] >= CONFIDENCE,
        "quick": all(max(s["constant"]["plan_s"], s["constant"]["search_s"]) <= PLAN_S for s in sizes),
    }


def _home(phase: Phase, guilty: Collection[NodeId]) -> list[int]:
    return [index for index, group in enumerate(phase.groups) if not set(guilty).isdisjoint(group)]


if __name__ == "__main__":
    sys.exit(main())
