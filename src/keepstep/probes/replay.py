"""Replay on real processes: ask the planner, run its rounds, feed the outcomes back, until there is a verdict.

    verdict = examine(workers, Job(command=("python", "replay.py")), record=Path("search.jsonl"))

Called again with the same words and the same record it goes on where it was, or returns the verdict that is there.
Everything that follows from an outcome is worked out anew from the record; only the groups of a round are drawn, so
they are written down before they run.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import assert_never

from msgspec import Struct

from keepstep.core.locate.replay_posterior import Prior
from keepstep.core.locate.replay_search import Search, Terms, Verdict, advance, next_step, open_search
from keepstep.model.ids import NodeId
from keepstep.probes.exceptions import ForeignRecord, NothingRan
from keepstep.probes.groups import Job, Outcome, Worker, judge_sums, run_round
from keepstep.probes.record import SCHEMA, Begun, Ended, Judged, Line, Ordered, Ran, Record


class _Standing(Struct, kw_only=True):
    """Where a record stands.

    Attributes:
        step: number of the step that is open, or comes next.
        order: the open step's order, with the quiet repeats that are done.
        ran: outcomes of the open repeat by group, without those that could not be run.
        sums: results of all groups that passed.
    """

    search: Search
    step: int = 0
    order: Ordered | None = None
    clean: int = 0
    ran: dict[int, Outcome]
    sums: Counter[tuple[str, ...]]
    verdict: Verdict | None = None

    def judged(self, expected: str) -> list[Outcome]:
        """The open repeat's outcomes, their results compared with each other and with earlier ones."""
        return judge_sums(list(self.ran.values()), self.sums.copy(), expected)


def examine(
    workers: Sequence[Worker],
    job: Job,
    *,
    record: Path,
    terms: Terms | None = None,
    prior: Prior | None = None,
    suspicion: Mapping[NodeId, float] | None = None,
    luck: Callable[[], float] | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> Verdict:
    """Find the machines that break ``job``.

    Args:
        record: file that this search is kept in; outputs of groups that did not pass are kept beside it.
        suspicion: weights of machines against each other, as in ``replay_posterior.begin``.
        luck: draws numbers from 0 to 1; the operating system's where not given.
        tell: is given a line for each round and for each group that did not pass.

    Raises:
        UnfitFleet: these machines cannot be told apart in groups.
        ForeignRecord: the record is about something else, or in use.
        NothingRan: not one group of a round could be started.
    """
    by_name = {worker.machine: worker for worker in workers}
    begun = Begun(
        schema=SCHEMA,
        machines=tuple(worker.machine for worker in workers),
        suspicion=dict(suspicion or {}),
        terms=terms or Terms(),
        prior=prior or Prior(),
        job=job,
    )
    search = open_search(begun.machines, begun.terms, begun.prior, begun.suspicion)
    draw = luck or random.SystemRandom().random
    with Record(record) as kept:
        if not kept.lines:
            kept.append(begun)
        _same(kept, begun)
        standing = _Standing(search=search, ran={}, sums=Counter())
        for line in kept.lines:
            _fold(standing, line)

        def write(line: Line) -> None:
            kept.append(line)
            _fold(standing, line)

        while standing.verdict is None:
            if standing.order is not None:
                _repeat(standing, by_name, job, record.with_name(f"{record.name}.out"), write, tell)
                continue
            step = next_step(standing.search, [draw() for _ in begun.machines])
            if isinstance(step, Verdict):
                write(Ended(verdict=step))
                break
            tell(f"round {standing.search.evidence.rounds + 1}: {step.reason}")
            write(Ordered(step=standing.step, phase=step.phase, repeats=step.repeats, reason=step.reason))
    assert standing.verdict is not None
    tell(standing.verdict.reason)
    return standing.verdict


def _repeat(
    standing: _Standing,
    workers: Mapping[NodeId, Worker],
    job: Job,
    outputs: Path,
    write: Callable[[Line], None],
    tell: Callable[[str], None],
) -> None:
    """Run what is missing of the open repeat, and judge it."""
    order, repeat = standing.order, standing.clean
    assert order is not None
    wanted = [index for index in range(len(order.phase.groups)) if index not in standing.ran]
    directory = outputs / f"{order.step}.{repeat}"
    void: list[Outcome] = []

    def done(outcome: Outcome) -> None:
        if outcome.kind == "void":
            void.append(outcome)
        else:
            write(Ran(step=order.step, repeat=repeat, outcome=outcome))

    run_round(order.phase, wanted, workers, job, directory, done)
    for folder in (directory, outputs):
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
    if not standing.ran:
        raise NothingRan(f"no group of round {order.step}.{repeat} could be run: {void[0].why}")
    odd = [outcome for outcome in (*standing.judged(job.expected), *void) if outcome.kind != "passed"]
    reasons = tuple(f"group {outcome.group} {outcome.kind}: {outcome.why}" for outcome in odd)
    for reason in reasons:
        tell(reason)
    write(
        Judged(
            step=order.step,
            repeat=repeat,
            failed=tuple(sorted(outcome.group for outcome in odd if outcome.kind == "failed")),
            void=tuple(sorted(outcome.group for outcome in odd if outcome.kind == "void")),
            reasons=reasons,
        )
    )


def _fold(standing: _Standing, line: Line) -> None:
    match line:
        case Begun():
            pass
        case Ordered():
            standing.order, standing.clean = line, 0
        case Ran():
            standing.ran[line.outcome.group] = line.outcome
        case Judged():
            standing.sums.update(o.sums for o in standing.ran.values() if o.kind == "passed" and o.sums)
            standing.ran = {}
            _close(standing, line)
        case Ended():
            standing.verdict = line.verdict
        case _:
            assert_never(line)


def _close(standing: _Standing, judged: Judged) -> None:
    """A repeat is over, and with it the step when a group failed, could not be run, or this was the last repeat."""
    order = standing.order
    assert order is not None
    if judged.failed or judged.void:
        standing.search = advance(
            standing.search, order.phase, clean=standing.clean, failed=judged.failed, void=judged.void
        )
    else:
        standing.clean += 1
        if standing.clean < order.repeats:
            return
        standing.search = advance(standing.search, order.phase, clean=standing.clean)
    standing.order, standing.clean = None, 0
    standing.step = order.step + 1


def _same(kept: Record, begun: Begun) -> None:
    first = kept.lines[0] if kept.lines else begun
    assert isinstance(first, Begun)
    for name in ("machines", "suspicion", "terms", "prior", "job"):
        if getattr(first, name) != getattr(begun, name):
            raise ForeignRecord(
                f"{kept.path} is the record of another search: {name} is not the same; name another file"
            )
