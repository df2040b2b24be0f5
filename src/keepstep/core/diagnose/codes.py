"""What a code means: every reading of a number or a name, the most likely one first.

A bare number is ambiguous: 137 is an exit code after SIGKILL and an Xid as well. All readings are given; a prefix
(``exit:137``, ``xid 137``) chooses one.
"""

from __future__ import annotations

import re
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from keepstep.core.diagnose.code_tables import CUDA, DRIVER_NAMES, EXITS, NCCL, NCCL_NAMES, SIGNALS
from keepstep.core.diagnose.decide import advice
from keepstep.core.diagnose.result import Culprit
from keepstep.core.diagnose.rule import Rule
from keepstep.core.diagnose.rules import BY_ID
from keepstep.core.diagnose.xid import MEANINGS, NAMES, sxid_rule, xid_rule
from keepstep.core.diagnose.xid_table import SXIDS, XIDS

Kind = Literal["xid", "sxid", "exit", "signal", "nccl", "cuda", "cause"]
"""``cause``: a name that a diagnosis gives to a root cause."""


class Meaning(Struct, frozen=True, kw_only=True):
    """A code explained.

    Attributes:
        likelihood: of this reading among those of a bare number, 0 to 1; 1 where there is no other.
        what: a sentence.
        action: as in a diagnosis; empty where the code alone asks for none.
        ask: what to type for this reading alone.
    """

    code: str
    kind: Kind
    what: str
    likelihood: float = 1.0
    category: str = ""
    action: str = ""
    advice: str = ""
    ask: str = ""
    source: str = ""


_CODE = re.compile(
    r"(?P<kind>s?xid|gpu|exit|exitcode|signal|sig|nccl|ncclerror|cuda|cudaerror)?[:=_]*(?P<number>-?\d{1,5})"
)
LARGEST_XID = 999
"""Of three digits, as the driver has them; an unknown one below is told to be unknown."""
SXID_DIGITS = 5
_SPACE = re.compile(r"\s+")
_CAMEL = re.compile(r"(?<=[a-z])(?=[A-Z])")

_OWN = "a code of the program's own; its output tells why"
_KNOWN_EXIT, _KNOWN_XID, _A_SIGNAL, _ANY_XID, _A_CUDA, _ANY_EXIT = 0.9, 0.8, 0.5, 0.3, 0.25, 0.15
"""How often a bare number of this sort is meant, relative to each other: a judgement, no measurement."""


def meanings(text: str) -> list[Meaning]:
    """Every reading of the code, the most likely one first; none when it is no code that is known."""
    words = " ".join(text.split())
    lower = words.lower()
    named = _by_name(lower)
    if named:
        return named
    found = _CODE.fullmatch(_SPACE.sub("", lower))
    if not found:
        return []
    kind, number = found["kind"] or "", int(found["number"])
    match kind:
        case "xid" | "gpu":
            return [_xid(abs(number))] if abs(number) <= LARGEST_XID else []
        case "sxid":
            return [_sxid(abs(number))] if len(str(abs(number))) == SXID_DIGITS else []
        case "exit" | "exitcode":
            return _exit(number)
        case "signal" | "sig":
            return [_signal(abs(number))] if abs(number) in SIGNALS else []
        case "nccl" | "ncclerror":
            return [_nccl(NCCL[number], number)] if number in NCCL else []
        case "cuda" | "cudaerror":
            return [_cuda(number)] if number in CUDA else []
        case _:
            return _bare(number)


def _bare(number: int) -> list[Meaning]:
    """All that a number alone may be, shares of 1."""
    given = [(_ANY_EXIT if one.what == _OWN else _KNOWN_EXIT, one) for one in _exit(number)]
    if number in XIDS:
        given.append((_KNOWN_XID if number in NAMES or number in MEANINGS else _ANY_XID, _xid(number)))
    if number in SXIDS:
        given.append((_KNOWN_XID, _sxid(number)))
    if number in SIGNALS:
        given.append((_A_SIGNAL, _signal(number)))
    if number in CUDA and number > 0:
        given.append((_A_CUDA, _cuda(number)))
    if all(weight <= _ANY_EXIT for weight, _ in given):
        return []  # A number that nobody has given a meaning.
    total = sum(weight for weight, _ in given)
    given.sort(key=lambda pair: -pair[0])
    return [_likely(one, weight / total) for weight, one in given]


def _by_name(lower: str) -> list[Meaning]:
    """NCCL results, CUDA errors, signals and root causes by their names."""
    joined = lower.replace(" ", "")
    if joined in NCCL_NAMES:
        return [_nccl(NCCL_NAMES[joined])]
    if joined in _CUDA_NAMES:
        return [_cuda(_CUDA_NAMES[joined])]
    cause = lower.replace(" ", "_").replace("-", "_")
    if cause in BY_ID and BY_ID[cause].role != "context":
        return [_of_rule(cause, "cause", BY_ID[cause], f"keepstep explain {cause}")]
    for number in _CODED_CAUSES.get(cause, ()):
        return [_of_rule(cause, "cause", xid_rule(number, True), f"keepstep explain xid:{number}")]
    for number, (name, _, _) in SIGNALS.items():
        if joined in (name.lower(), name.lower().removeprefix("sig")):
            return [_signal(number)]
    return []


def driver_name(name: str) -> str:
    """The name that the CUDA driver gives to an error of the runtime: ``CUDA_ERROR_ILLEGAL_ADDRESS``."""
    if name in DRIVER_NAMES:
        return DRIVER_NAMES[name]
    return "CUDA_ERROR_" + "_".join(_CAMEL.split(name.removeprefix("cudaError"))).upper()


_CUDA_NAMES = {
    told.lower(): number for number, (name, _, _) in CUDA.items() for told in (name, driver_name(name)) if number
} | {"cudasuccess": 0, "cuda_success": 0}
_CODED_CAUSES = {name: tuple(code for code, one in NAMES.items() if one == name) for name in NAMES.values()}


def _exit(number: int) -> list[Meaning]:
    """Codes of a process; one above 128 may be a signal's and a program's own."""
    given = []
    signal = -number if number < 0 else number - 128
    ask = f"keepstep explain exit:{number}"
    if number in EXITS:
        what, action = EXITS[number]
        given.append(
            _meaning(f"exit code {number}", "exit", what, action, ask, "keepstep exit codes, bash(1), sysexits.h")
        )
    if signal in SIGNALS and (number < 0 or number > 128):
        name, what, action = SIGNALS[signal]
        how = f"ended by signal {signal}: {what}"
        given.append(_meaning(f"exit code {number}: {name}", "exit", how, action, ask, "signal(7), bash(1)"))
    if not given and 0 <= number < 256:
        given.append(_meaning(f"exit code {number}", "exit", _OWN, "", ask, "exit(3)"))
    return given


def _xid(number: int) -> Meaning:
    name = XIDS[number][0] if number in XIDS else "not in the catalogue"
    return _of_rule(f"Xid {number} {name}", "xid", xid_rule(number, True), f"keepstep explain xid:{number}")


def _sxid(number: int) -> Meaning:
    severe = number in SXIDS and SXIDS[number][1]
    return _of_rule(f"SXid {number}", "sxid", sxid_rule(number, severe), f"keepstep explain sxid:{number}")


def _signal(number: int) -> Meaning:
    name, what, action = SIGNALS[number]
    return _meaning(
        f"{name} (signal {number})", "signal", what, action, f"keepstep explain signal:{number}", "signal(7)"
    )


def _nccl(row: tuple[str, str, str], number: int | None = None) -> Meaning:
    name, what, action = row
    code = name if number is None else f"{name} (NCCL result {number})"
    return _meaning(code, "nccl", what, action, f"keepstep explain {name}", "NCCL API: types")


def _cuda(number: int) -> Meaning:
    name, what, action = CUDA[number]
    return _meaning(
        f"{name} ({number}, {driver_name(name)})" if number else name,
        "cuda",
        what,
        action,
        f"keepstep explain {name}",
        "CUDA runtime API: cudaError_t",
    )


def _likely(one: Meaning, share: float) -> Meaning:
    return replace(one, likelihood=round(share, 2))


def _of_rule(code: str, kind: Kind, rule: Rule, ask: str) -> Meaning:
    return Meaning(
        code=code,
        kind=kind,
        what=rule.says,
        category=rule.category,
        action=rule.action,
        advice=advice(rule.action, rule.id, Culprit()),
        ask=ask,
        source=rule.source,
    )


def _meaning(code: str, kind: Kind, what: str, action: str, ask: str, source: str) -> Meaning:
    told = advice(action, "", Culprit()) if action else ""
    return Meaning(code=code, kind=kind, what=what, action=action, advice=told, ask=ask, source=source)
