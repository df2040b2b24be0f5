"""Dual-phase replay: which one of many machines breaks the job, found by running it on two sets of groups. Pure.

The machines are divided twice so that no two of them share a group both times. A machine that breaks whatever it runs
in breaks one group of each phase, and the two groups have no other machine in common (ByteRobust, SOSP '25, Algorithm
1). The paper divides by quotient and remainder, which needs ``size * size <= machines`` and sizes that divide. Here any
number of machines will do: the second phase is built as a 0/1 matrix with given row and column sums (Gale-Ryser), the
rows being groups of the first phase, the columns those of the second.

Groups are whole multiples of ``unit``, the machines that one model replica needs. Up to ``unit - 1`` machines sit a
phase out; they are a row of their own, no machine sits out twice, and "no group failed" points at them. Faults that
show only sometimes, several faults and false alarms are the business of ``replay_posterior``.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from msgspec import Struct

from keepstep.model.ids import NodeId

MOST_MACHINES = 100_000
"""More than this is nobody's job; it bounds the time that a plan takes."""


class UnfitFleet(ValueError):
    """These machines cannot be told apart by replaying in groups of this size; the message says what would do."""


class Phase(Struct, frozen=True, kw_only=True):
    """Groups that run at the same time, no machine in two of them.

    Attributes:
        idle: machines that run in none, as they are too few for another model replica.
    """

    groups: tuple[tuple[NodeId, ...], ...]
    idle: tuple[NodeId, ...] = ()

    @property
    def machines(self) -> int:
        return sum(len(group) for group in self.groups)


class Plan(Struct, frozen=True, kw_only=True):
    """What to run, why so, what else was thought of.

    Attributes:
        phases: both, known before the first is run; or only the first one, where two are not enough.
        rounds: phases until a single constant fault is named; ``narrow`` makes those that are not in ``phases``.
        machine_hours: of all rounds, each group run once.
    """

    phases: tuple[Phase, ...]
    rounds: int
    machine_hours: float
    reason: str
    rejected: tuple[str, ...]
    cost_if_wrong: str


class Reading(Struct, frozen=True, kw_only=True):
    """What the outcomes say if there is one fault and it always shows.

    Attributes:
        suspects: the machines that explain all outcomes, one when the question is answered.
        clash: the outcomes cannot come from one machine that always fails.
    """

    suspects: tuple[NodeId, ...]
    clash: bool
    reason: str


def plan(machines: Sequence[NodeId], *, size: int, unit: int = 1, run_s: float = 120.0) -> Plan:
    """Two phases such that any one machine that always fails is named.

    Args:
        size: wanted machines per group in the first phase: as many as the fault needs to show. Taken smaller where
            two phases would not do otherwise.
        unit: machines of one model replica (whole pipelines); group sizes are multiples of it.
        run_s: seconds that one replay takes, for the cost.

    Raises:
        UnfitFleet: fewer than two groups of ``unit`` machines, doubled names, or sizes that contradict each other.
    """
    _check(machines, size, unit)
    rejected: list[str] = []
    for wanted in range(size, 0, -unit):
        shares = _shares(len(machines), wanted, unit)
        if second := _split(machines, shares, unit):
            break
        rejected.append(f"groups of {wanted}: {max(shares)} machines of one group do not fit into as many others")
    one = _blocks(machines, shares)
    rounds = 2 if second else _rounds(len(machines), unit)
    hours = one.machines * rounds * run_s / 3600
    reason = f"{len(machines)} machines in {len(one.groups)} groups of {_sizes(one)}, "
    if second:
        reason += f"then in {len(second.groups)} of {_sizes(second)}: no two machines share a group twice"
    else:
        reason += f"then those of the failing one apart: {rounds} rounds, as replicas of {unit} are too large for two"
    if len(rejected) > 3:
        rejected = [rejected[0], f"{len(rejected) - 2} sizes between, for the same reason", rejected[-1]]
    each = f"all machines one by one: {_apart(len(machines), unit)} rounds of {unit} machines around each suspect"
    return Plan(
        phases=(one, second) if second else (one,),
        rounds=rounds,
        machine_hours=hours,
        reason=reason,
        rejected=(*rejected, each),
        cost_if_wrong=(
            f"an innocent machine goes to repair, the fault stays in the job and is searched for again: "
            f"{rounds} rounds, {hours:.1f} machine-hours, beside what the next crash costs"
        ),
    )


def read(phases: Sequence[Phase], failed: Sequence[Collection[int]]) -> Reading:
    """Who is in the failing group of every phase; ``failed`` has the indices of those groups, phase by phase.

    A phase in which nothing failed points at the machines that sat it out.
    """
    assert len(phases) == len(failed), "outcomes for each phase that was run"
    if not any(failed) and not set(phases[0].idle).intersection(*(phase.idle for phase in phases)):
        return Reading(suspects=(), clash=False, reason="no group failed: the fault did not show, or no machine has it")
    left: set[NodeId] | None = None
    lines: list[str] = []
    several = [index for index, bad in enumerate(failed) if len(bad) > 1]
    for number, (phase, bad) in enumerate(zip(phases, failed, strict=True), 1):
        inside = {machine for index in bad for machine in phase.groups[index]} if bad else set(phase.idle)
        left = inside if left is None else left & inside
        lines.append(f"phase {number}: " + (f"group {_words(sorted(bad))} failed" if bad else "none failed"))
    order = {machine: at for at, machine in enumerate(m for g in (*phases[0].groups, phases[0].idle) for m in g)}
    suspects = tuple(sorted(left or (), key=order.__getitem__))
    story = "; ".join(lines)
    if several:
        return Reading(suspects=suspects, clash=True, reason=f"{story}: more than one machine, or a false alarm")
    if not suspects:
        return Reading(suspects=(), clash=True, reason=f"{story}: no machine was in all of these, it shows sometimes")
    who = suspects[0] if len(suspects) == 1 else f"{len(suspects)} machines"
    return Reading(suspects=suspects, clash=False, reason=f"{story}: only {who} explains that")


def narrow(machines: Sequence[NodeId], suspects: Sequence[NodeId], *, unit: int = 1) -> Phase:
    """The next phase where two were not enough: the suspects apart from each other, the others fill the groups."""
    return deal(machines, suspects, unit=unit)


def deal(
    machines: Sequence[NodeId], suspects: Sequence[NodeId] = (), *, unit: int = 1, groups: int | None = None
) -> Phase:
    """As many groups as there can be (or ``groups``), suspects dealt out to them one by one in the order given.

    So the first ones never meet, and if machines have to sit out, they are the least suspicious ones.
    """
    count = min(groups or MOST_MACHINES, len(machines) // unit)
    if count < 1:
        raise UnfitFleet(f"{len(machines)} machines are fewer than one model replica needs ({unit})")
    first = set(suspects)
    order = [*suspects, *(machine for machine in machines if machine not in first)]
    shares = _even(len(machines) // unit, count, unit)
    hands: list[list[NodeId]] = [[] for _ in shares]
    open_ = list(range(count))
    at = 0
    for machine in order[: sum(shares)]:
        at %= len(open_)
        index = open_[at]
        hands[index].append(machine)
        if len(hands[index]) == shares[index]:
            open_.pop(at)
        else:
            at += 1
    return Phase(groups=tuple(map(tuple, hands)), idle=tuple(order[sum(shares) :]))


def _check(machines: Sequence[NodeId], size: int, unit: int) -> None:
    count = len(machines)
    if len(set(machines)) < count:
        raise UnfitFleet(f"{count - len(set(machines))} of {count} machine names appear twice")
    if count > MOST_MACHINES:
        raise UnfitFleet(f"{count} machines are more than {MOST_MACHINES}")
    if unit < 1 or size < unit or size % unit:
        raise UnfitFleet(f"group size {size} must be a positive multiple of the machines of one replica ({unit})")
    if count < 2 * unit:
        raise UnfitFleet(
            f"{count} machines make fewer than two groups of {unit}; replay with smaller replicas, or add "
            f"{2 * unit - count} machines known to be good"
        )


def _shares(count: int, size: int, unit: int) -> tuple[int, ...]:
    """Sizes of the first phase's groups: at least two, none below ``size`` where that can be."""
    return _even(count // unit, max(2, count // size), unit)


def _even(units: int, groups: int, unit: int) -> tuple[int, ...]:
    """``units`` model replicas over ``groups``, in machines, as evenly as can be, larger ones first."""
    few, more = divmod(units, groups)
    return tuple((few + (index < more)) * unit for index in range(groups))


def _blocks(machines: Sequence[NodeId], shares: Sequence[int]) -> Phase:
    """Consecutive machines: neighbours share a switch, so most groups of the first phase stay inside one."""
    groups, at = [], 0
    for share in shares:
        groups.append(tuple(machines[at : at + share]))
        at += share
    return Phase(groups=tuple(groups), idle=tuple(machines[at:]))


def _split(machines: Sequence[NodeId], shares: Sequence[int], unit: int) -> Phase | None:
    """The second phase: each row's machines go to different columns; ``None`` where no such division exists.

    Row by row into the columns with the most room left, which finds a matrix with these sums whenever there is one
    (Gale-Ryser). The row of idle machines goes first: the idle column has the least room, so none of them takes it.
    """
    units = len(machines) // unit
    rest = len(machines) - units * unit
    columns = max(len(shares), max(shares))
    if columns > units:
        columns = units
    room = [*_even(units, columns, unit), rest]
    hands: list[list[NodeId]] = [[] for _ in room]
    one = _blocks(machines, shares)
    for row in (one.idle, *one.groups):
        best = sorted(range(len(room)), key=lambda index: (-room[index], index))[: len(row)]
        if len(best) < len(row) or any(room[index] == 0 for index in best):
            return None
        for machine, index in zip(row, best, strict=True):
            hands[index].append(machine)
            room[index] -= 1
    return Phase(groups=tuple(map(tuple, hands[:-1])), idle=tuple(hands[-1]))


def _rounds(count: int, unit: int) -> int:
    """Rounds to name one of ``count`` when each divides the suspects among all groups of ``unit`` that there can be."""
    groups = count // unit
    suspects = max(*_shares(count, unit, unit), count % unit)
    rounds = 1
    while suspects > 1:
        suspects = -(-suspects // groups)
        rounds += 1
    return rounds


def _apart(count: int, unit: int) -> int:
    """Rounds when each suspect has a group of its own among machines that rotate."""
    return -(-count // (count // unit))


def _sizes(phase: Phase) -> str:
    sizes = sorted({len(group) for group in phase.groups})
    return f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"


def _words(indices: Sequence[int]) -> str:
    return ", ".join(map(str, indices[:4])) + (f" and {len(indices) - 4} more" if len(indices) > 4 else "")
