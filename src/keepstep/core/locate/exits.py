"""What an exit says by itself: whose fault it looks like, and whether it is a cause or a consequence."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from keepstep.model.facts import WorkerExited
from keepstep.model.records import Category

if TYPE_CHECKING:
    from keepstep.core.locate.told import Told

_SIGNALS = {1: "SIGHUP", 2: "SIGINT", 3: "SIGQUIT", 4: "SIGILL", 5: "SIGTRAP", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE",
            9: "SIGKILL", 11: "SIGSEGV", 13: "SIGPIPE", 14: "SIGALRM", 15: "SIGTERM"}  # fmt: skip

_FROM_OUTSIDE = frozenset({1, 2, 7, 9, 15})
"""Signals that a program does not normally earn by its own code: killed, out of memory, failed memory."""

_BUS = 7
"""Also what a program gets whose /dev/shm is too small."""

_ABORT = 6
"""What NCCL's watchdog ends a survivor with."""

_ECHOES = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Socket closed",
    "ncclRemoteError",
    "NCCL communicator was aborted",
    "Broken pipe",
    "recvValue failed",
    "sendBytes failed",
)
"""What gloo, NCCL and the rendezvous store say when *another* process has gone."""


_KERNEL = re.compile(r"nvrm|\bs?xid\b|machine check|\bmce\b|hardware error|\bedac\b", re.IGNORECASE)
"""What the kernel writes to its own log; a worker that writes it quotes somebody, if only its own data."""
_DRIVER_TYPES = re.compile(r"accelerator|cuda|cudnn|cublas|nccl|distbackend|\bhip", re.IGNORECASE)
_DRIVER_WORDS = re.compile(r"cuda|cudnn|cublas|nccl|nvml|\bhip\b|ecc error|device-side", re.IGNORECASE)

_DEVICE_WORDS = re.compile(r"cuda (error|failure)|hip error|uncorrectable|\becc\b|\bs?xid\b", re.IGNORECASE)


class Judgement(Struct, frozen=True, kw_only=True):
    """Attributes:
    consequence: a victim of another fault, not a culprit.
    words: the exit in one phrase.
    """

    category: Category
    consequence: bool
    probability: float
    words: str


def overruled(fact: WorkerExited, judged: Judgement, told: Told, seat: str) -> Judgement:
    """The judgement of the exit in the light of what all ranks have written.

    Words never make a process that was killed from outside the user's fault: they may be about something that the
    program got over long before.
    """
    from_outside = fact.signal in _FROM_OUTSIDE and fact.signal != _BUS
    if fact.killed_by_us or (_clean_error(fact) and told.evidence and _KERNEL.search(told.evidence[0])):
        return judged
    if seat in told.seats and told.root_cause:
        if from_outside and told.category != "infrastructure":
            return judged
        if judged.consequence and told.category not in ("infrastructure", "data"):
            return judged
        same = judged.category == told.category
        sure = max(judged.probability, told.probability) if same else told.probability
        return replace(judged, category=told.category, consequence=False, probability=sure)
    if from_outside:
        return judged
    if seat in told.echoes or (told.root_cause and fact.error is None and not fact.signal and fact.code is not None):
        return replace(judged, category="transient", consequence=True, probability=0.8)
    return judged


def by_driver(fact: WorkerExited) -> bool:
    """Whether its own exception comes from the driver or from NCCL, or a signal ended it: more than words."""
    if fact.signal:
        return not fact.killed_by_us and not echoes(fact)
    error = fact.error
    if error is None:
        return False
    plain = error.type.rpartition(".")[2] == "RuntimeError"
    return bool(_DRIVER_TYPES.search(error.type)) or (plain and bool(_DRIVER_WORDS.search(error.message)))


def broken_device(words: str) -> bool:
    """Whether the error of a broken collective is of the rank's own device, not of a peer that has gone."""
    return bool(_DEVICE_WORDS.search(words))


def _clean_error(fact: WorkerExited) -> bool:
    """An exception of the program's own, which no kernel message in its output explains."""
    return fact.error is not None and not fact.error.consequence and not by_driver(fact)


def signal_name(number: int) -> str:
    return _SIGNALS.get(number, f"signal {number}")


def words(fact: WorkerExited) -> str:
    """The exit in one phrase, with the exception or the last line of stderr when there is one."""
    if fact.signal:
        how = f"killed by {signal_name(fact.signal)}"
    elif fact.code is None:
        how = "gone, nobody saw how"
    else:
        how = f"exit code {fact.code}"
    if fact.error:
        where = f" at {fact.error.file}:{fact.error.line}" if fact.error.file else ""
        return f"{how} ({fact.error.type}: {fact.error.message}{where})"
    last = next((line.strip() for line in reversed(fact.stderr_tail) if line.strip()), "")
    return f"{how} ({last[:160]})" if last else how


def echoes(fact: WorkerExited) -> bool:
    """Whether its last lines tell of somebody else's end."""
    return any(text in line for line in fact.stderr_tail for text in _ECHOES)


def judge(fact: WorkerExited, *, amid: bool) -> Judgement:
    """Judge one exit with a code other than 0, or a code 0 that came too early.

    Args:
        amid: another fault is already known in this recovery; an unexplained failure code is then its echo.
    """
    phrase = words(fact)
    if fact.error is not None:
        category: Category = "transient" if fact.error.consequence else "user_code"
        return Judgement(category=category, consequence=fact.error.consequence, probability=0.97, words=phrase)
    echo = echoes(fact)
    if fact.killed_by_us:
        return Judgement(category="unknown", consequence=False, probability=0.5, words=phrase)
    if fact.signal and not (echo and fact.signal == _ABORT):
        outside = fact.signal in _FROM_OUTSIDE
        return Judgement(
            category="infrastructure" if outside else "unknown",
            consequence=False,
            probability=0.95 if outside else 0.6,
            words=phrase,
        )
    if fact.code is None and not fact.signal:
        return Judgement(category="infrastructure", consequence=False, probability=0.7, words=phrase)
    if fact.code is not None and fact.code >= 128:
        return Judgement(category="unknown", consequence=False, probability=0.6, words=phrase)
    if echo or amid:
        return Judgement(category="transient", consequence=True, probability=0.8, words=phrase)
    return Judgement(category="user_code", consequence=False, probability=0.8, words=phrase)
