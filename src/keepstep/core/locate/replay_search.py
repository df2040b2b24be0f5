"""The search for faulty machines by replay: which groups to run next, how often, and when to stop. Pure.

Each step reads what all runs so far say (``replay_posterior``) and either orders another round, or answers. A round
keeps the most suspicious machines apart, so that one more failing group tells them apart; it is repeated until a group
fails, since passing rounds alone say the same about all of them. A constant fault is named after two rounds, as in
``replay.plan``; one that shows in two percent of the runs after about two failing rounds, wherever they come.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Literal

import msgspec
from msgspec import Struct

from keepstep.core.locate.replay import Phase, deal, plan
from keepstep.core.locate.replay_posterior import (
    MOST_FAULTS,
    Evidence,
    Posterior,
    Prior,
    begin,
    observe_passes,
    posterior,
)
from keepstep.model.ids import NodeId

MOST_FAILING = MOST_FAULTS + 1
"""Groups of one round that may fail, one of them by a false alarm. More: it is not a few machines."""
MOST_ROUNDS = 10_000
"""Ceiling of ``Terms.most_rounds``: a search that takes longer is a soak test."""
FEW = 0.05
"""Share of the posterior below which a hit rate is not planned for."""
HALF_WAY = 0.7
"""Rounds between two looks, times the hit rate: half of the faults of that rate have shown by then (ln 2)."""
SHOWN = 3
"""Suspects that an open verdict names."""


class Terms(Struct, frozen=True, kw_only=True):
    """What a search may cost and how sure it has to be.

    Attributes:
        size: wanted machines per group; 0 takes what two rounds need.
        unit: machines of one model replica; group sizes are multiples of it.
        run_s: seconds that one replay takes.
        confidence: posterior probability at which a machine is convicted, or the search ends without one.
        everyone: go on after the first until it is as sure that there is no other.
        most_rounds: rounds after which the search ends with what it has.
        most_machine_hours: the same for machine time; 0 is no limit.
    """

    size: int = 0
    unit: int = 1
    run_s: float = 120.0
    confidence: float = 0.95
    everyone: bool = False
    most_rounds: int = 1000
    most_machine_hours: float = 0.0

    def __post_init__(self) -> None:
        if not 0.5 < self.confidence < 1:
            raise ValueError(f"confidence ({self.confidence}) must be above 0.5 and below 1")
        if not 1 <= self.most_rounds <= MOST_ROUNDS:
            raise ValueError(f"most_rounds ({self.most_rounds}) must be 1 to {MOST_ROUNDS}")
        if self.run_s <= 0 or self.most_machine_hours < 0:
            raise ValueError(
                f"run_s ({self.run_s}) must be positive, most_machine_hours ({self.most_machine_hours}) not below 0"
            )


class Replay(Struct, frozen=True, kw_only=True):
    """Run the groups of ``phase`` side by side; up to ``repeats`` times, but not again once one of them has failed."""

    phase: Phase
    repeats: int
    reason: str
    machine_hours: float
    """Of all repeats."""
    cost_if_wrong: str


class Verdict(Struct, frozen=True, kw_only=True):
    """The end of a search.

    Attributes:
        kind: ``found``; ``nobody`` (no machine is at fault); ``many`` (more than a few are, so none of them alone is);
            ``open`` (the budget is used up, ``machines`` are the most suspicious ones and are not convicted).
        probability: of each of ``machines`` that it is faulty; of the statement where there are none.
        complete: probability that no other machine is faulty.
    """

    kind: Literal["found", "nobody", "many", "open"]
    machines: tuple[NodeId, ...]
    probability: tuple[float, ...]
    complete: float
    reason: str
    evidence: tuple[str, ...]
    rejected: tuple[str, ...]
    cost_if_wrong: str
    rounds: int
    machine_hours: float


class Search(Struct, frozen=True, kw_only=True):
    """Where a search stands. ``known`` are the convicted machines with their probability at that moment."""

    evidence: Evidence
    prior: Prior
    terms: Terms
    belief: Posterior
    known: tuple[tuple[NodeId, float], ...] = ()
    storm: str = ""


def open_search(
    machines: Sequence[NodeId], terms: Terms, prior: Prior, suspicion: Mapping[NodeId, float] | None = None
) -> Search:
    """Raises ``UnfitFleet`` where these machines cannot be told apart at all."""
    plan(machines, size=_size(len(machines), terms), unit=terms.unit)
    evidence = begin(machines, suspicion)
    return Search(evidence=evidence, prior=prior, terms=terms, belief=posterior(evidence, prior))


def advance(
    search: Search, phase: Phase, *, clean: int = 0, failed: Collection[int] = (), void: Collection[int] = ()
) -> Search:
    """Fold in ``clean`` rounds without a failing group, and one more where ``failed`` or ``void`` are given."""
    if len(failed) > MOST_FAILING:
        what = f"{len(failed)} of {len(phase.groups)} groups failed in one round"
        return msgspec.structs.replace(search, storm=what)
    evidence = observe_passes(search.evidence, phase, clean, failed, void=void)
    known = search.known
    belief = posterior(evidence, search.prior, _names(known))
    while (best := _best(evidence, belief, known)) is not None and belief.guilt[best] >= search.terms.confidence:
        known = (*known, (evidence.machines[best], belief.guilt[best]))
        belief = posterior(evidence, search.prior, _names(known))
    return msgspec.structs.replace(search, evidence=evidence, belief=belief, known=known)


def next_step(search: Search, luck: Sequence[float] = ()) -> Replay | Verdict:
    """Another round, or the answer.

    Args:
        luck: one random number per machine, drawn anew for each call; it shuffles machines that are equally
            suspicious. Without it they keep their order.
    """
    terms, known = search.terms, _names(search.known)
    spent = search.evidence.machine_runs * terms.run_s / 3600
    if search.storm:
        return _end(search, "many", f"{search.storm}: not a few machines, but what they share")
    nobody_else = search.belief.faults[len(known)]
    if known and (not terms.everyone or nobody_else >= terms.confidence or len(known) >= len(search.prior.faults) - 1):
        return _end(search, "found", "")
    if not known and nobody_else >= terms.confidence:
        return _end(search, "nobody", "no machine: the fault would have shown by now")
    machines = [machine for machine in search.evidence.machines if machine not in known]
    if len(machines) < 2 * terms.unit:
        return _end(search, "open", f"{len(machines)} machines are too few to divide further")
    left = terms.most_rounds - search.evidence.rounds
    if left <= 0:
        return _end(search, "open", f"{terms.most_rounds} rounds are used up")
    phase = _phase(search, machines, luck)
    hours = phase.machines * terms.run_s / 3600
    repeats = min(_repeats(search), left)
    if terms.most_machine_hours:
        repeats = min(repeats, int((terms.most_machine_hours - spent) / hours))
        if repeats < 1:
            return _end(
                search, "open", f"another round of {hours:.1f} machine-hours goes beyond {terms.most_machine_hours:g}"
            )
    return Replay(
        phase=phase,
        repeats=repeats,
        reason=_why(search, phase),
        machine_hours=hours * repeats,
        cost_if_wrong=f"{hours:.1f} machine-hours a round that say nothing new",
    )


def _size(count: int, terms: Terms) -> int:
    """The largest multiple of the unit with which there are as many groups as each has machines."""
    return terms.size or max(terms.unit, math.isqrt(count) // terms.unit * terms.unit)


def _phase(search: Search, machines: Sequence[NodeId], luck: Sequence[float]) -> Phase:
    terms, evidence = search.terms, search.evidence
    size = min(_size(len(machines), terms), len(machines) // (2 * terms.unit) * terms.unit)
    if not evidence.rounds and not luck:
        return plan(machines, size=size, unit=terms.unit).phases[0]
    at = {machine: index for index, machine in enumerate(evidence.machines)}
    guilt = search.belief.guilt
    chance = luck or [0.0] * len(at)
    order = sorted(machines, key=lambda m: (-round(guilt[at[m]], 9), chance[at[m]], at[m]))
    top = guilt[at[order[0]]]
    apart = sum(guilt[at[machine]] >= top / 2 for machine in order) if evidence.failures else 0
    return deal(machines, order, unit=terms.unit, groups=max(2, len(machines) // size, apart))


def _repeats(search: Search) -> int:
    """Rounds until about half of the faults that show most often would have shown."""
    likely = [rate for rate, share in search.belief.rates if share >= FEW]
    return max(1, round(HALF_WAY / max(likely)))


def _best(evidence: Evidence, belief: Posterior, known: Sequence[tuple[NodeId, float]]) -> int | None:
    names = _names(known)
    open_ = [at for at, machine in enumerate(evidence.machines) if machine not in names]
    return max(open_, key=lambda at: (belief.guilt[at], -at), default=None)


def _names(known: Sequence[tuple[NodeId, float]]) -> tuple[NodeId, ...]:
    return tuple(machine for machine, _ in known)


def _suspects(search: Search) -> list[tuple[NodeId, float]]:
    known = _names(search.known)
    pairs = zip(search.evidence.machines, search.belief.guilt, strict=True)
    return sorted(((m, p) for m, p in pairs if m not in known), key=lambda pair: -pair[1])


def _why(search: Search, phase: Phase) -> str:
    evidence = search.evidence
    where = f"{len(phase.groups)} groups, {len(evidence.failures)} failing runs in {evidence.rounds} rounds so far"
    if not evidence.failures:
        return (
            f"{where}: all machines are equally suspicious"
            if len(set(evidence.odds)) == 1
            else f"{where}: by suspicion, the first ones apart"
        )
    machine, guilt = _suspects(search)[0]
    return f"{where}: {machine} is the most suspicious ({guilt:.2f}), and kept apart from the next ones"


def _end(search: Search, kind: Literal["found", "nobody", "many", "open"], why: str) -> Verdict:
    evidence, terms = search.evidence, search.terms
    hours = evidence.machine_runs * terms.run_s / 3600
    suspects = _suspects(search)
    shown = search.known if kind == "found" else tuple(suspects[:SHOWN]) if kind == "open" else ()
    nobody_else = search.belief.faults[len(search.known)]
    if search.known and kind != "found":
        shown, kind, why = search.known, "found", f"{why}; whether there are others is open"
    lines = tuple(_line(evidence, machine) for machine, _ in shown)
    told = ", ".join(f"{machine} ({chance:.3f})" for machine, chance in shown) or "no machine"
    reason = f"{told} after {evidence.rounds} rounds of replay" + (f": {why}" if why else f": {lines[0]}")
    return Verdict(
        kind=kind,
        machines=_names(shown),
        probability=tuple(chance for _, chance in shown) or ((nobody_else,) if kind == "nobody" else ()),
        complete=nobody_else,
        reason=reason,
        evidence=lines,
        rejected=tuple(
            f"{machine}: probability {chance:.3f}; {_line(evidence, machine)}"
            for machine, chance in suspects[:SHOWN]
            if machine not in _names(shown)
        ),
        cost_if_wrong=_price(kind, hours),
        rounds=evidence.rounds,
        machine_hours=hours,
    )


def _price(kind: str, hours: float) -> str:
    again = f"another search like this one ({hours:.1f} machine-hours)"
    if kind == "found":
        return f"an innocent machine goes to repair; the fault stays, and its next crash costs {again}"
    return f"a faulty machine goes back to work; its next crash costs {again}"


def _line(evidence: Evidence, machine: NodeId) -> str:
    at = evidence.machines.index(machine)
    failing = sum(at in group for group in evidence.failures)
    runs = evidence.passes[at] + failing
    return f"{machine} was in {failing} of {len(evidence.failures)} failing groups, in {runs} runs"
