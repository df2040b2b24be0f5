"""Guard: what the numbers of training say, and what is done about it. Pure; the same answer on all ranks.

Three things are looked for: values that are no numbers, values far outside their own recent past, and replicas that
are not equal any more. What is fed in here is equal on all ranks (sums over ranks, gathered fingerprints), so ranks
come to the same decision without asking one another again.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from keepstep.checkpoint.exceptions import BadSetting
from keepstep.model.env import GUARD as VARIABLE

Mode = Literal["off", "observe", "on"]
Kind = Literal["nonfinite", "spike", "replicas"]
Action = Literal["tell", "rollback", "stop"]
MODES: tuple[Mode, ...] = ("off", "observe", "on")

MIN_WINDOW = 16
"""Steps; the median of fewer moves with every value."""
MAX_WINDOW = 10_000
"""Steps; a longer past is not recent, and the median is taken anew at each look."""
MIN_SPIKE = 4.0
"""Normal noise leaves the median by 4 deviations once in 32,000 steps; a lower limit would fire on good runs."""
MAX_SPIKE = 1e6
"""Deviations; beyond it nothing that a float can show is a spike before it is infinite."""
LOSS_FLOOR, NORM_FLOOR = 0.01, 0.5
"""A deviation counts as this share of the median at least: a window of equal values must not make noise a spike.
Gradient norms wander more than losses; real spikes are of another size (BLOOM-176B: 0.24 to 960 in two steps)."""
RECOUNT = 8
"""Values that are judged by the same median before it is taken anew: sorting costs more than measuring."""
_SIGMA = 1.4826
"""Median absolute deviation to standard deviation, for normal noise."""


class Guard(Struct, frozen=True, kw_only=True):
    """What ``keepstep.init(guard=...)`` takes.

    Attributes:
        mode: ``observe`` tells, ``on`` also acts, ``off`` does nothing. ``None``: as ``KEEPSTEP_GUARD`` says, else
            ``observe``.
        every: steps between two looks at losses and gradient norms. A look tells of each step since the last one.
        window: steps of the recent past that a loss or norm is compared with.
        spike: deviations (robust ones, by median and MAD) above the median from which a value counts as a spike.
        norms: steps between two norms of the gradients; 0 for none. While steps are done again each one is measured.
        compare_every: steps between two comparisons of the replicas, bit for bit; 0 for none.
        keep_every: steps between two copies of the state in this process's memory, to which ``on`` rolls back; a
            multiple of ``compare_every`` where there is one, else of ``every``. 0: no copies, no way back.
        nonfinite: what ``on`` does about NaN or infinity in losses or gradients.
        spikes: what it does about a spike.
        replicas: what it does about replicas that differ.
        skip: in ``on``: look at the gradients before each optimizer step, and leave the update out when one is not
            finite. Costs a tiny all-reduce per optimizer step and, on CUDA, a wait for the device.
        max_rollbacks: how often a run is rolled back; the next time it stops.
    """

    mode: Mode | None = None
    every: int = 16
    window: int = 128
    spike: float = 6.0
    norms: int = 8
    compare_every: int = 100
    keep_every: int = 500
    nonfinite: Action = "rollback"
    spikes: Action = "tell"
    replicas: Action = "rollback"
    skip: bool = False
    max_rollbacks: int = 3


def settle(asked: Guard | None, environ: Mapping[str, str]) -> Guard | None:
    """The settings that hold, ``mode`` decided; ``None`` where there is no guard. An argument beats the variable.

    Raises:
        BadSetting: names the setting, its value and the way out.
    """
    said = environ.get(VARIABLE, "")
    if said and said not in MODES:
        raise BadSetting(f"{VARIABLE}={said!r} is none of {', '.join(MODES)}", f"set {VARIABLE}=observe or unset it")
    if asked is None and not said:
        return None
    settings = asked or Guard()
    _check(settings)
    mode = settings.mode or said or "observe"
    return None if mode == "off" else replace(settings, mode=mode)


def _check(g: Guard) -> None:
    def refuse(name: str, why: str, help: str) -> None:
        raise BadSetting(f"Guard({name}={getattr(g, name)!r}) {why}", help)

    if g.mode is not None and g.mode not in MODES:
        refuse("mode", f"is none of {', '.join(MODES)}", "for example mode='observe'")
    for name in ("nonfinite", "spikes", "replicas"):
        if getattr(g, name) not in ("tell", "rollback", "stop"):
            refuse(name, "is none of tell, rollback, stop", f"for example {name}='tell'")
    for name, least in (
        ("every", 1),
        ("window", 1),
        ("norms", 0),
        ("compare_every", 0),
        ("keep_every", 0),
        ("max_rollbacks", 0),
    ):
        value = getattr(g, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            refuse(name, f"must be a whole number of {least} or more", f"for example {name}={max(least, 1)}")
    if not MIN_WINDOW <= g.window <= MAX_WINDOW:
        refuse("window", f"must lie between {MIN_WINDOW} and {MAX_WINDOW} steps", "128 suits most runs")
    if not MIN_SPIKE <= g.spike <= MAX_SPIKE:  # also refuses NaN
        refuse(
            "spike",
            f"must lie between {MIN_SPIKE:g} and {MAX_SPIKE:g} deviations: a lower limit cannot hold, ordinary noise "
            f"would cross it every few thousand steps, and a higher one is never crossed",
            "6 is early without false alarms",
        )
    base = "compare_every" if g.compare_every else "every"
    if g.keep_every % getattr(g, base):
        refuse(
            "keep_every", f"must be a multiple of {base} ({getattr(g, base)})", "only what has been looked at is kept"
        )
    if g.keep_every == 0 and g.mode == "on" and "rollback" in (g.nonfinite, g.spikes, g.replicas):
        refuse("keep_every", "keeps nothing to roll back to", "give it steps, or choose 'tell' or 'stop' as actions")


# -------------------------------------------------------------------- losses and norms


class Reading(NamedTuple):
    """One step, over all ranks. ``None`` where nobody measured it.

    Attributes:
        loss: mean of the ranks' finite losses.
        norm: of the gradients, all ranks together.
        bad_losses, bad_norms: ranks whose own was no finite number.
    """

    step: int
    loss: float | None = None
    norm: float | None = None
    bad_losses: int = 0
    bad_norms: int = 0


class Trouble(NamedTuple):
    """Something is wrong with a step. ``ranks`` is empty where nobody can be named."""

    kind: Kind
    step: int
    why: str
    ranks: tuple[int, ...] = ()
    tensor: str = ""
    everywhere: bool = False
    """On all ranks alike, each of which has a batch of its own."""


class Window:
    """The recent past of one quantity."""

    def __init__(self, size: int, spike: float, floor: float) -> None:
        self._spike, self._floor = spike, floor
        self._held: deque[tuple[int, float]] = deque(maxlen=size)
        self._known: tuple[float, float] | None = None
        self._age = 0
        self._least = max(MIN_WINDOW, size // 2)

    def judge(self, step: int, value: float) -> tuple[float, float] | None:
        """Median and limit where ``value`` is above the limit. Takes it into the window in any case: the median does
        not follow single values, and must follow a level that has come to stay."""
        if self._known is None or self._age >= RECOUNT:
            self._known, self._age = self.limit(), 0
        found = self._known
        self._age += 1
        self._held.append((step, value))
        return found if found is not None and value > found[1] else None

    def limit(self) -> tuple[float, float] | None:
        """Median, and what a spike lies above; ``None`` before enough is known."""
        if len(self._held) < self._least:
            return None
        values = [value for _, value in self._held]
        middle = statistics.median(values)
        deviation = _SIGMA * statistics.median(abs(value - middle) for value in values)
        return middle, middle + self._spike * max(deviation, self._floor * abs(middle))

    def forget_from(self, step: int) -> None:
        """Steps from here on are taken back."""
        self._held = deque((pair for pair in self._held if pair[0] < step), maxlen=self._held.maxlen)
        self._known = None


class Windows:
    """Judges readings, in the order of their steps."""

    def __init__(self, settings: Guard) -> None:
        self._loss = Window(settings.window, settings.spike, LOSS_FLOOR)
        self._norm = Window(settings.window, settings.spike, NORM_FLOOR)

    def judge(self, reading: Reading) -> Trouble | None:
        """What is wrong with this step, the worst first."""
        if reading.bad_losses or reading.bad_norms:
            parts = [f"loss of {_ranks(reading.bad_losses)}"] if reading.bad_losses else []
            parts += [f"gradients of {_ranks(reading.bad_norms)}"] if reading.bad_norms else []
            return Trouble("nonfinite", reading.step, f"not a finite number: {', '.join(parts)}")
        for name, window, value in (("loss", self._loss, reading.loss), ("norm", self._norm, reading.norm)):
            found = window.judge(reading.step, value) if value is not None and math.isfinite(value) else None
            if found is not None:
                what = "loss" if name == "loss" else "gradient norm"
                return Trouble(
                    "spike", reading.step, f"{what} {value:.4g} above {found[1]:.4g} (median {found[0]:.4g})"
                )
        return None

    def forget_from(self, step: int) -> None:
        self._loss.forget_from(step)
        self._norm.forget_from(step)


def _ranks(count: int) -> str:
    return f"{count} rank" if count == 1 else f"{count} ranks"


# -------------------------------------------------------------------- replicas


class Vote(NamedTuple):
    """What comparing fingerprints says.

    Attributes:
        compared: ranks that have at least one replica.
        odd: ranks that differ from the majority of their replicas.
        tied: ranks that differ among themselves with no majority: corruption is certain, who has it is not.
        model: for each odd rank one of the majority.
    """

    compared: int
    odd: tuple[int, ...] = ()
    tied: tuple[int, ...] = ()
    model: tuple[int, ...] = ()

    @property
    def agreed(self) -> bool:
        return not self.odd and not self.tied


def vote(rows: Sequence[tuple[int, int]]) -> Vote:
    """Compare ranks that hold the same pieces.

    Args:
        rows: by rank: what it holds (equal for replicas of one another), and the fingerprint of that.
    """
    alike: dict[int, list[int]] = {}
    for rank, (holds, _) in enumerate(rows):
        alike.setdefault(holds, []).append(rank)
    compared, odd, tied, model = 0, [], [], []
    for ranks in alike.values():
        if len(ranks) < 2:
            continue
        compared += len(ranks)
        counts = Counter(rows[rank][1] for rank in ranks)
        (print_, most), *_ = counts.most_common(1)
        if len(counts) == 1:
            continue
        if 2 * most > len(ranks):
            strange = [rank for rank in ranks if rows[rank][1] != print_]
            odd += strange
            model += [next(rank for rank in ranks if rows[rank][1] == print_)] * len(strange)
        else:
            tied += ranks
    pairs = sorted(zip(odd, model, strict=True))
    return Vote(compared, tuple(rank for rank, _ in pairs), tuple(sorted(tied)), tuple(one for _, one in pairs))


# -------------------------------------------------------------------- what to do


class Order(NamedTuple):
    """What is done about a trouble, and why. ``skip``: leave the update of that step out when it comes again."""

    action: Action
    why: str
    skip: bool = False


class History:
    """What has been done so far in this epoch, and from that what to do next.

    Args:
        replaceable: somebody takes a machine out whose replica differs again; training need not stop for that.
    """

    def __init__(self, settings: Guard, *, replaceable: bool = False) -> None:
        self._settings, self._replaceable = settings, replaceable
        self._seen: Counter[tuple[Kind, int]] = Counter()
        self._odd: Counter[int] = Counter()
        self.rollbacks = 0

    def decide(self, trouble: Trouble, *, kept: int | None, again: bool = False) -> Order:
        """An order for this trouble.

        Args:
            kept: the step of the state that all ranks can go back to; ``None`` for none.
            again: it is the one for which steps are being done again, seen at its own step now.
        """
        g = self._settings
        wanted: Action = {"nonfinite": g.nonfinite, "spike": g.spikes, "replicas": g.replicas}[trouble.kind]
        if g.mode != "on" or wanted == "tell":
            return Order("tell", "nothing is done about it")
        if wanted == "stop":
            return Order("stop", "the guard is set to stop")
        if kept is None:
            return Order("stop", "there is no common state to go back to")
        if self.rollbacks >= g.max_rollbacks:
            return Order("stop", f"it has been rolled back {self.rollbacks} times already (max_rollbacks)")
        before = again or self._seen[trouble.kind, trouble.step] > 0
        self._seen[trouble.kind, trouble.step] += 1
        if trouble.kind == "replicas":
            named = self.named_before(trouble)
            self._odd.update(trouble.ranks)
            if named and not self._replaceable:
                return Order("stop", f"rank {named[0]} has been named before: its hardware is suspect")
        self.rollbacks += 1
        if trouble.kind != "replicas" and before:
            return Order("rollback", "the same inputs gave it twice: data or software; that update is left out", True)
        return Order("rollback", f"training goes back to step {kept}")

    def named_before(self, trouble: Trouble) -> tuple[int, ...]:
        """Ranks that an earlier comparison has outvoted, too."""
        return tuple(rank for rank in trouble.ranks if self._odd[rank])
