"""Who it is when the fault shows only sometimes: what all replays together say about every machine. Pure.

A machine that diverges in one run of fifty (AEGIS, OSDI '26, saw such a GPU) passes almost every replay. So each run is
evidence, not an answer. The posterior is exact over all sets of up to ``MOST_FAULTS`` faulty machines: a group with
``k`` of them passes with ``(1 - rate)**k * (1 - false_alarm)``. Passed runs multiply a weight per machine; only
failing runs tie machines together, and machines that were in the same failing runs differ in their weight alone. So
sets are summed by such classes (elementary symmetric polynomials), which takes milliseconds for a thousand machines.

Assumed: runs are independent, and machines that are faulty at the same time show at one common rate, drawn from
``rates``. A stated rate that is far too high clears guilty machines; give several where it is not known.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import combinations_with_replacement

from msgspec import Struct

from keepstep.core.locate.replay import Phase
from keepstep.model.ids import NodeId

MOST_FAULTS = 3
"""Faulty machines at the same time that are thought of; more than that is a fault of the job or of a whole domain."""
MOST_TERMS = 20_000
"""Sums over classes of machines; beyond it one faulty machine fewer is thought of (never fewer than one)."""


class Prior(Struct, frozen=True, kw_only=True):
    """What is believed before the first run.

    Attributes:
        rates: how often a faulty machine breaks its group, with the weight of each rate.
        false_alarm: how often a group of healthy machines fails, per run.
        faults: probability of no, one, two, three faulty machines. None of them means that the job's code or data, the
            storage or the network is at fault: ByteRobust (table 2) found user code behind two thirds of the illegal
            memory accesses, but replay comes after the code was rolled back.
    """

    rates: tuple[tuple[float, float], ...] = ((1.0, 0.5), (0.3, 0.2), (0.1, 0.15), (0.02, 0.15))
    false_alarm: float = 1e-6
    faults: tuple[float, ...] = (0.15, 0.75, 0.08, 0.02)

    def __post_init__(self) -> None:
        if not self.rates or any(not 0 < rate <= 1 or weight <= 0 for rate, weight in self.rates):
            raise ValueError(f"rates ({self.rates}) must be pairs of a rate in (0, 1] and a positive weight")
        if not 0 <= self.false_alarm < 1:
            raise ValueError(f"false_alarm ({self.false_alarm}) must be in [0, 1)")
        if not 2 <= len(self.faults) <= MOST_FAULTS + 1 or min(self.faults) < 0 or not any(self.faults[1:]):
            raise ValueError(
                f"faults ({self.faults}) must be probabilities of 0 to {MOST_FAULTS} faulty machines at most"
            )


class Evidence(Struct, frozen=True, kw_only=True):
    """All runs so far, as far as they matter.

    Attributes:
        passes: runs that each machine was in and that did not fail.
        failures: the groups that failed, once for each time.
        odds: how suspicious each machine was before, relative to the others.
        rounds, machine_runs: what it has cost.
    """

    machines: tuple[NodeId, ...]
    odds: tuple[float, ...]
    passes: tuple[int, ...]
    failures: tuple[frozenset[int], ...] = ()
    rounds: int = 0
    machine_runs: int = 0


class Posterior(Struct, frozen=True, kw_only=True):
    """Attributes:
    guilt: probability of each machine that it is faulty, in the order of ``Evidence.machines``.
    faults: probability of each number of faulty machines.
    rates: probability of each hit rate, given that there is a faulty machine.
    depth: most faulty machines at once that were thought of.
    """

    guilt: tuple[float, ...]
    faults: tuple[float, ...]
    rates: tuple[tuple[float, float], ...]
    depth: int


class Contradiction(ValueError):
    """No hypothesis explains these outcomes: a constant fault that passed, or an alarm where none can be false."""


def begin(machines: Sequence[NodeId], suspicion: Mapping[NodeId, float] | None = None) -> Evidence:
    """Nothing run yet. ``suspicion`` weighs machines against each other (1 where not given), 0 rules one out."""
    odds = tuple((suspicion or {}).get(machine, 1.0) for machine in machines)
    if not machines or not any(odds) or min(odds) < 0:
        raise ValueError(f"suspicion must leave at least one of {len(machines)} machines possible, and none below 0")
    return Evidence(machines=tuple(machines), odds=odds, passes=(0,) * len(machines))


def observe(evidence: Evidence, phase: Phase, failed: Collection[int], *, void: Collection[int] = ()) -> Evidence:
    """One run of each group of ``phase``; ``void`` groups could not be run and prove nothing."""
    return observe_passes(evidence, phase, 0, failed, void=void)


def observe_passes(
    evidence: Evidence, phase: Phase, clean: int, failed: Collection[int] = (), *, void: Collection[int] = ()
) -> Evidence:
    """``clean`` rounds in which no group failed, and one more in which ``failed`` did (none after it if empty)."""
    index = {machine: at for at, machine in enumerate(evidence.machines)}
    passes = list(evidence.passes)
    failures = list(evidence.failures)
    runs = 0
    last = 1 if failed or void or not clean else 0
    for number, group in enumerate(phase.groups):
        members = [index[machine] for machine in group]
        ran = clean + (last if number not in void else 0)
        runs += ran * len(group)
        bad = number in failed
        if bad:
            failures.append(frozenset(members))
        for member in members:
            passes[member] += ran - bad
    return Evidence(
        machines=evidence.machines,
        odds=evidence.odds,
        passes=tuple(passes),
        failures=tuple(failures),
        rounds=evidence.rounds + clean + last,
        machine_runs=evidence.machine_runs + runs,
    )


def posterior(evidence: Evidence, prior: Prior, known: Collection[NodeId] = ()) -> Posterior:
    """Exact up to ``depth`` faulty machines.

    Args:
        known: machines taken as proven; what is asked is whether there are others beside them.

    Raises:
        Contradiction: nothing explains the outcomes.
    """
    found = tuple(at for at, machine in enumerate(evidence.machines) if machine in known)
    classes = _classes(evidence, found)
    deepest = min(len(prior.faults) - 1, len(evidence.machines))
    depth = len(found) + _depth(len(classes), deepest - len(found))
    before = _symmetric(evidence.odds, depth)
    sums = [_Sum(evidence, classes, found, rate, prior, before) for rate, _ in prior.rates]
    top = max(part.top for part in sums)
    if top == -math.inf:
        raise Contradiction(
            f"nothing explains {len(evidence.failures)} failing groups in {evidence.rounds} rounds: "
            "allow lower hit rates, or false alarms"
        )
    guilt = [0.0] * len(evidence.machines)
    faults = [0.0] * (depth + 1)
    rates: list[float] = []
    for part, (_, weight) in zip(sums, prior.rates, strict=True):
        scale = weight * math.exp(part.top - top)
        for extra, value in enumerate(part.by_size):
            faults[len(found) + extra] += scale * value
        rates.append(scale * sum(part.by_size if found else part.by_size[1:]))
        part.add_guilt(guilt, scale)
    total, some = sum(faults), sum(rates)
    for at in found:
        guilt[at] = total
    return Posterior(
        guilt=tuple(min(1.0, max(0.0, value / total)) for value in guilt),
        faults=tuple(value / total for value in faults),
        rates=tuple((rate, value / some if some else 0.0) for (rate, _), value in zip(prior.rates, rates, strict=True)),
        depth=depth,
    )


def _classes(evidence: Evidence, found: Collection[int]) -> dict[int, list[int]]:
    """Machines by the set of failing runs that they were in, as a bit mask; proven ones are in none."""
    masks = [0] * len(evidence.machines)
    for bit, group in enumerate(evidence.failures):
        for member in group:
            masks[member] |= 1 << bit
    classes: dict[int, list[int]] = {}
    for at, mask in enumerate(masks):
        if at not in found:
            classes.setdefault(mask, []).append(at)
    return classes


def _depth(classes: int, wanted: int) -> int:
    """Most further faulty machines that can be thought of within ``MOST_TERMS`` sums."""
    depth = max(0, wanted)
    while depth > 1 and math.comb(classes + depth, depth) > MOST_TERMS:
        depth -= 1
    return depth


def _symmetric(weights: Iterable[float], depth: int) -> list[float]:
    """Elementary symmetric polynomials: sums over all products of 0, 1, ... ``depth`` different weights."""
    sums = [1.0, *([0.0] * depth)]
    for weight in weights:
        for size in range(depth, 0, -1):
            sums[size] += weight * sums[size - 1]
    return sums


class _Sum:
    """The part of the posterior that belongs to one hit rate, relative to ``exp(top)``."""

    def __init__(
        self,
        evidence: Evidence,
        classes: Mapping[int, Sequence[int]],
        found: Sequence[int],
        rate: float,
        prior: Prior,
        before: Sequence[float],
    ) -> None:
        self._members = list(classes.values())
        self._weights = [_weight(evidence, at, rate) for at in range(len(evidence.machines))]
        extra = len(before) - 1 - len(found)
        self._sums = [_symmetric((self._weights[at] for at in members), extra) for members in self._members]
        silent = [1 - (1 - rate) ** guilty * (1 - prior.false_alarm) for guilty in range(len(before))]
        fails = [_log(chance) for chance in silent]
        base = [sum(at in group for at in found) for group in evidence.failures]
        start = sum(_log(self._weights[at]) for at in found)
        logs: list[tuple[float, tuple[int, ...]]] = []
        inside = [[mask >> bit & 1 for bit in range(len(base))] for mask in classes]
        weigh = [[_log(value) for value in sums] for sums in self._sums]
        possible = [index for index, sums in enumerate(self._sums) if extra and sums[1]]
        for size in range(extra + 1):
            number = len(found) + size
            fixed = start + _log(prior.faults[number]) - _log(before[number]) if before[number] else -math.inf
            for chosen in combinations_with_replacement(possible, size) if fixed > -math.inf else ():
                value = fixed + sum([weigh[at][chosen.count(at)] for at in set(chosen)])
                guilty = map(sum, zip(base, *[inside[at] for at in chosen], strict=True))
                value += sum(map(fails.__getitem__, guilty))
                if value > -math.inf:
                    logs.append((value, chosen))
        self.top = max((value for value, _ in logs), default=-math.inf)
        self.by_size = [0.0] * (extra + 1)
        self._shares: dict[tuple[int, int], float] = {}
        for value, chosen in logs:
            share = math.exp(value - self.top)
            self.by_size[len(chosen)] += share
            for at in set(chosen):
                key = (at, chosen.count(at))
                self._shares[key] = self._shares.get(key, 0.0) + share

    def add_guilt(self, guilt: list[float], scale: float) -> None:
        """To each machine its part of the sets that hold it: among those of its class, by weight."""
        for (at, count), share in self._shares.items():
            sums = self._sums[at]
            for member in self._members[at]:
                weight = self._weights[member]
                without = 1.0
                for size in range(1, count):
                    without = sums[size] - weight * without
                guilt[member] += scale * share * weight * without / sums[count]


def _weight(evidence: Evidence, at: int, rate: float) -> float:
    passes: int = evidence.passes[at]
    silence: float = (1 - rate) ** passes
    return evidence.odds[at] * silence


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf
