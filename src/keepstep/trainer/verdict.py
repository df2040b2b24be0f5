"""Verdict: what kind of fault it was, from doing the same steps again with the same input. Pure.

    came out well                                 transient: a soft error of some machine, or a race
    wrong again, on every rank and batch          software: code, settings or state
    wrong again on one rank, well without it      data: the batch of that rank
    wrong again, and again without that batch     software
    the same replica differs again                hardware that fails for good

A passing fault is put down to a rank by comparing bits: of the losses that each rank had the first time and has now,
and of what each rank held. Everything before the fault is the same bits; the first thing that is not is where it was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from keepstep.trainer.guard import Trouble

Kind = Literal["data", "software", "transient", "hardware"]
WATCHED_STEPS = 8
"""Steps behind the one whose update was left out that have to be well before its batch is to blame."""
Losses = Mapping[int, str]
"""By step, in hexadecimal: equal text is equal bits."""


class Judged(NamedTuple):
    """``others``: ranks that did the same work and came to the same result as before."""

    verdict: Kind
    step: int
    why: str
    ranks: tuple[int, ...] = ()
    tensor: str = ""
    others: tuple[int, ...] = ()


def passed(trouble: Trouble, first: Sequence[Losses], again: Sequence[Losses]) -> Judged:
    """It came out well when it was done again: whose fault was it?

    Args:
        first, again: losses by rank, of the steps up to the one in question.
    """
    world = len(first)
    step, odd = earliest(first, again)
    if trouble.ranks and not set(odd) <= set(trouble.ranks):
        why = (
            f"it is gone, but step {step} came to other losses on other ranks, too: it had not the same input again "
            f"(is the data registered?), so nobody can be named"
        )
        return _transient(trouble, (), world, why)
    if trouble.ranks:
        return _transient(trouble, trouble.ranks, world, "it was seen there, and is gone now that it was done again")
    if odd and (len(odd) < world or world == 1):
        why = f"the loss of step {step} came out otherwise when it was done again, all before it are the same bits"
        return _transient(trouble, odd, world, why)
    if odd:
        why = (
            f"losses are the same bits up to step {step - 1} and others from step {step} on, on all ranks: a gradient "
            f"was wrong before it was added up, and no sum tells whose"
        )
        return _transient(trouble, (), world, why)
    return _transient(trouble, (), world, "the same step came out well when it was done again, and nobody can be named")


def earliest(first: Sequence[Losses], again: Sequence[Losses]) -> tuple[int, tuple[int, ...]]:
    """The first step in which any rank's loss has other bits, and those ranks; none where there is no such step."""
    steps = sorted(set.intersection(*(set(one) for one in (*first, *again))) if first else ())
    for step in steps:
        odd = tuple(r for r, (a, b) in enumerate(zip(first, again, strict=True)) if a[step] != b[step])
        if odd:
            return step, odd
    return -1, ()


class Seen(NamedTuple):
    """What ranks knew of the same steps, the first time or again.

    Attributes:
        prints: by rank: what it held where replicas differed, as one number; empty where it is not known.
        losses: by rank.
    """

    prints: Sequence[int]
    losses: Sequence[Losses]


def agree_again(trouble: Trouble, first: Seen, again: Seen, tied: Sequence[int] = ()) -> Judged:
    """Replicas differed and do not any more.

    A wrong weight makes a wrong loss on its own rank, a step before the sums of gradients carry it to all others: the
    first loss with other bits tells whose weight it was. Where it had no time to do so, what ranks held tells it.

    Args:
        tied: ranks of which one is wrong and no majority tells which; empty where a majority named ``trouble.ranks``.
    """
    world = len(first.losses)
    if trouble.ranks:
        return _transient(trouble, trouble.ranks, world, "the others outvoted it, and it is gone now")
    among = set(tied) or set(range(world))
    held = tuple(r for r, (a, b) in enumerate(zip(first.prints, again.prints, strict=False)) if a != b and r in among)
    if 0 < len(held) < len(among):
        why = "what it held then is not what the same steps come to now; the others hold the very same bits"
        return _transient(trouble, held, world, why)
    step, odd = earliest(first.losses, again.losses)
    odd = tuple(rank for rank in odd if rank in among)
    if 0 < len(odd) < len(among):
        why = f"its loss in step {step} was the first that comes out otherwise when the same steps are done again"
        return _transient(trouble, odd, world, why)
    more = "; steps do not come out the same bits here, so nobody can be named" if held else ""
    return _transient(trouble, (), world, f"the replicas agree again{more}")


def differs_again(trouble: Trouble, named: Sequence[int], world: int) -> Judged:
    """The same replica was outvoted before."""
    why = "outvoted again after the same steps were done again from a clean state"
    return Judged("hardware", trouble.step, why, tuple(named), trouble.tensor, _rest(named, world))


def everywhere(trouble: Trouble) -> Judged:
    """It came again, on all ranks, each of which has a batch of its own."""
    why = "it came again on every rank, whatever the batch and the machine"
    return Judged("software", trouble.step, why, (), trouble.tensor)


class Watch(NamedTuple):
    """A step whose update was left out, and what will tell whether that has mended it."""

    trouble: Trouble

    def well(self, step: int) -> Judged | None:
        """``step`` is well."""
        if step < self.trouble.step + WATCHED_STEPS:
            return None
        why = f"it came again with the same batch, and the {WATCHED_STEPS} steps behind are well without it"
        return Judged("data", self.trouble.step, why, self.trouble.ranks, self.trouble.tensor)

    def bad(self, trouble: Trouble) -> Judged | None:
        """Something is wrong with a later step."""
        near = self.trouble.step < trouble.step < self.trouble.step + WATCHED_STEPS
        if trouble.kind != self.trouble.kind or not near:
            return None
        why = f"leaving the batch out did not mend it: it came again in step {trouble.step}"
        return Judged("software", self.trouble.step, why, (), self.trouble.tensor)


def _transient(trouble: Trouble, ranks: Sequence[int], world: int, why: str) -> Judged:
    return Judged(
        "transient", trouble.step, why, tuple(ranks), trouble.tensor, _rest(ranks, world) if ranks else ()
    )  # fmt: skip


def _rest(named: Sequence[int], world: int) -> tuple[int, ...]:
    return tuple(rank for rank in range(world) if rank not in named)
