"""What a code means: Xid, SXid, NCCL results, exit codes, signals, and the names that a diagnosis gives to causes."""

from __future__ import annotations

import re

from msgspec import Struct

from keepstep.core.diagnose.decide import advice
from keepstep.core.diagnose.result import Culprit
from keepstep.core.diagnose.rule import Rule
from keepstep.core.diagnose.rules import BY_ID
from keepstep.core.diagnose.xid import sxid_rule, xid_rule
from keepstep.core.diagnose.xid_table import SXIDS, XIDS
from keepstep.model import exits


class Meaning(Struct, frozen=True, kw_only=True):
    """A code explained.

    Attributes:
        what: a sentence.
        action: as in a diagnosis; empty where the code alone asks for none.
    """

    code: str
    what: str
    category: str = ""
    action: str = ""
    advice: str = ""
    source: str = ""


_NCCL = {
    "ncclsuccess": ("no error", ""),
    "ncclunhandledcudaerror": ("a CUDA call inside NCCL failed; the CUDA error before it is the cause", "investigate"),
    "ncclsystemerror": ("a system call inside NCCL failed: network device, memory limit or a dead peer", "investigate"),
    "ncclinternalerror": ("NCCL met a state it does not know; look for the WARN line before it", "investigate"),
    "ncclinvalidargument": ("the program gave NCCL a wrong argument", "stop_and_notify_user"),
    "ncclinvalidusage": ("the program calls NCCL wrongly, or ranks run different versions", "stop_and_notify_user"),
    "ncclremoteerror": ("another rank exited or the network failed: a consequence; look there", "investigate"),
    "ncclinprogress": ("an operation has not finished yet", ""),
    "nccltimeout": ("an operation took too long: a consequence; look for the rank that is missing", "investigate"),
}
_SIGNALS = {
    1: ("SIGHUP", "the terminal or session that had started the process was closed", "stop_and_notify_user"),
    2: ("SIGINT", "somebody pressed Ctrl-C", "no_action"),
    4: ("SIGILL", "an instruction that this processor does not know: wrong build", "stop_and_notify_user"),
    6: ("SIGABRT", "the process ended itself, as NCCL's watchdog does after a time-out", "investigate"),
    7: ("SIGBUS", "memory behind a file is missing, mostly because /dev/shm is too small", "stop_and_notify_user"),
    8: ("SIGFPE", "an arithmetic fault in native code", "stop_and_notify_user"),
    9: ("SIGKILL", "killed from outside: by the kernel for want of memory, the scheduler or a person", "investigate"),
    10: ("SIGUSR1", "a notice of the scheduler, mostly before the time limit", "no_action"),
    11: ("SIGSEGV", "a crash in native code", "investigate"),
    15: ("SIGTERM", "told to stop; whoever sent it knows why", "no_action"),
}
_EXITS = {
    exits.DONE: "finished",
    1: "an uncaught exception of a Python program, or any program's general error",
    2: "wrong arguments, as argparse reports them",
    exits.BAD_USAGE: "keepstep: wrong flags or arguments",
    exits.BAD_CONFIG: "keepstep: wrong configuration or version",
    exits.PREFLIGHT: "keepstep: refused before anything started",
    exits.NO_PROGRESS: "keepstep: the same fault came back without progress; do not restart",
    126: "the program is not executable",
    127: "the program was not found",
    exits.REQUEUE: "keepstep: an infrastructure fault that needs another allocation, or saved before a preemption",
}
_CODE = re.compile(r"(?P<kind>s?xid|gpu|exit(?: ?code)?|signal|sig)?[ :=_]*(?P<number>-?\d{1,5})", re.IGNORECASE)


def meanings(text: str) -> list[Meaning]:
    """Every meaning of the code; none when it is no code that is known."""
    words = " ".join(text.split())
    lower = words.lower().replace(" ", "")
    if lower in _NCCL:
        what, action = _NCCL[lower]
        return [_meaning(words, what, action, "NCCL API: types")]
    if words.lower() in BY_ID and BY_ID[words.lower()].role != "context":
        return [_of_rule(words.lower(), BY_ID[words.lower()])]
    for number, (name, what, action) in _SIGNALS.items():
        if lower in (name.lower(), name.lower().removeprefix("sig")):
            return [_meaning(f"{name} (signal {number})", what, action, "signal(7)")]
    found = _CODE.fullmatch(words)
    if not found:
        return []
    kind, number = (found["kind"] or "").lower(), int(found["number"])
    number = number if kind.startswith("exit") or not kind else abs(number)
    given: list[Meaning] = []
    if kind in ("", "xid", "gpu") and number in XIDS:
        given.append(_of_rule(f"Xid {number} {XIDS[number][0]}", xid_rule(number, True)))
    if kind in ("", "sxid") and number in SXIDS:
        given.append(_of_rule(f"SXid {number}", sxid_rule(number, SXIDS[number][1])))
    if kind.startswith("exit") or kind == "":
        given += _exit(number)
    if kind.startswith("sig") and number in _SIGNALS:
        name, what, action = _SIGNALS[number]
        given.append(_meaning(f"{name} (signal {number})", what, action, "signal(7)"))
    return given


def _exit(number: int) -> list[Meaning]:
    signal = -number if number < 0 else number - 128
    if number in _EXITS:
        return [_meaning(f"exit code {number}", _EXITS[number], "", "keepstep exit codes, sysexits, bash(1)")]
    if signal in _SIGNALS and (number < 0 or number > 128):
        name, what, action = _SIGNALS[signal]
        return [_meaning(f"exit code {number}: {name}", what, action, "signal(7)")]
    return []


def _of_rule(code: str, rule: Rule) -> Meaning:
    return Meaning(
        code=code,
        what=rule.says,
        category=rule.category,
        action=rule.action,
        advice=advice(rule.action, rule.id, Culprit()),
        source=rule.source,
    )


def _meaning(code: str, what: str, action: str, source: str) -> Meaning:
    told = advice(action, "", Culprit()) if action else ""
    return Meaning(code=code, what=what, action=action, advice=told, source=source)
