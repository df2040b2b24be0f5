"""How many rounds a search will take, before it is begun: stated, so that it can be held against what happened. Pure.

A search needs a number of failing rounds and not a number of rounds: how many follows from a rehearsal in which one
machine fails as evenly as its rate says. Failing rounds of a fault that shows with probability ``p`` per round come as
coin throws do, so the rounds until the ``h``-th follow the negative binomial distribution.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from msgspec import Struct

from keepstep.core.locate.replay import Phase
from keepstep.core.locate.replay_posterior import Prior
from keepstep.core.locate.replay_search import Search, Terms, Verdict, advance, next_step, open_search
from keepstep.model.ids import NodeId

MOST_STATED = 1_000_000
"""Rounds beyond which no number is stated."""
GOLDEN = (math.sqrt(5) - 1) / 2
"""Multiples of it spread evenly over the unit interval: luck enough for a rehearsal."""


class Played(Struct, frozen=True, kw_only=True):
    """What became of one order: rounds without a failing group, then (if any) the groups of the one that failed."""

    clean: int = 0
    failed: tuple[int, ...] = ()
    void: tuple[int, ...] = ()


Play = Callable[[Phase, int], Played]
"""Runs a phase up to so many times."""


class Forecast(Struct, frozen=True, kw_only=True):
    """What one fault with this hit rate will cost.

    Attributes:
        hits: failing rounds until a machine is convicted.
        expected_rounds: on average.
        rounds: with the wanted confidence a verdict is there by then, and right.
        fixed_rounds: what two phases with a fixed number of repeats take for the same confidence.
        machine_hours: of ``rounds``.
    """

    rate: float
    hits: int
    expected_rounds: float
    rounds: int
    fixed_rounds: int
    machine_hours: float
    reason: str


def rehearse(search: Search, play: Play, lucks: Iterable[Sequence[float]] = ()) -> tuple[Search, Verdict]:
    """Play a search to its end; ``lucks`` has the random numbers for each step, none after its end."""
    numbers = iter(lucks)
    while True:
        step = next_step(search, next(numbers, ()))
        if isinstance(step, Verdict):
            return search, step
        told = play(step.phase, step.repeats)
        assert told.clean + bool(told.failed or told.void) >= 1, "an order that is played takes at least one round"
        search = advance(search, step.phase, clean=told.clean, failed=told.failed, void=told.void)


def forecast(machines: Sequence[NodeId], terms: Terms, prior: Prior, *, rate: float) -> Forecast:
    """Rounds for one machine that breaks its group with probability ``rate``.

    Half of the doubt that ``terms.confidence`` leaves is given to the verdict and half to its coming too late.

    Raises:
        ValueError: this prior never convicts such a machine, false alarms are too frequent for it.
    """
    hits = _hits(machines, terms, prior, rate)
    late = (1 + terms.confidence) / 2
    rounds = rounds_for(hits, rate, late)
    silent = 1 - math.sqrt(terms.confidence)
    fixed = 2 * (1 if rate == 1 else math.ceil(math.log(silent) / math.log1p(-rate)))
    return Forecast(
        rate=rate,
        hits=hits,
        expected_rounds=hits / rate,
        rounds=rounds,
        fixed_rounds=fixed,
        machine_hours=rounds * len(machines) * terms.run_s / 3600,
        reason=(
            f"{hits} failing rounds name one of {len(machines)} machines; at {rate:g} per round that takes "
            f"{hits / rate:.0f} rounds on average and at most {rounds} in {late:.1%} of the searches"
        ),
    )


def rounds_for(hits: int, rate: float, confidence: float) -> int:
    """Rounds by which ``hits`` of them have failed with this confidence, each failing with probability ``rate``."""
    chance = rate**hits
    total = chance
    rounds = hits
    while total < confidence:
        chance *= rounds / (rounds + 1 - hits) * (1 - rate)
        rounds += 1
        total += chance
        if rounds > MOST_STATED:
            raise ValueError(f"{hits} failing rounds at rate {rate:g} take more than {MOST_STATED} rounds")
    return rounds


def _hits(machines: Sequence[NodeId], terms: Terms, prior: Prior, rate: float) -> int:
    """Failing rounds until the verdict, when they come at even distances."""
    guilty = machines[len(machines) // 2]
    search = open_search(machines, Terms(unit=terms.unit, size=terms.size, confidence=terms.confidence), prior)
    quiet = round(1 / rate) - 1
    left = quiet

    def play(phase: Phase, repeats: int) -> Played:
        nonlocal left
        at = next((number for number, group in enumerate(phase.groups) if guilty in group), None)
        if left >= repeats or at is None:
            left -= repeats if at is not None else 0
            return Played(clean=repeats)
        clean, left = left, quiet
        return Played(clean=clean, failed=(at,))

    lucks = ([(at + 1) * (step + 1) * GOLDEN % 1 for at in range(len(machines))] for step in range(terms.most_rounds))
    done, verdict = rehearse(search, play, lucks)
    if verdict.kind != "found":
        raise ValueError(
            f"hit rate {rate:g} is not told from false alarms ({prior.false_alarm:g} per run) or from no fault at all"
        )
    return len(done.evidence.failures)
