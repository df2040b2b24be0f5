"""The page of codes, made from the tables that ``keepstep explain`` reads."""

from __future__ import annotations

from keepstep.core.diagnose.code_tables import CUDA, EXITS, NCCL, SIGNALS
from keepstep.core.diagnose.codes import driver_name
from keepstep.core.diagnose.rule import Rule
from keepstep.core.diagnose.rules import RULES
from keepstep.core.diagnose.xid import sxid_rule, xid_rule
from keepstep.core.diagnose.xid_table import SXIDS, XIDS

HEAD = """# Codes

What `keepstep explain CODE` knows, offline. A bare number may have several readings; all of them are told, the most
likely one first, and a prefix asks for one alone: `exit:137`, `xid:79`, `sxid:20034`, `signal:9`, `nccl:6`, `cuda:700`.
Names work as they are (`ncclRemoteError`, `CUDA_ERROR_ILLEGAL_ADDRESS`, `SIGBUS`), and so do the names of causes that a
diagnosis gives. A code alone is weak evidence: the log around it decides, and an empty action means that the code asks
for nothing by itself.
"""


def page() -> str:
    parts = [HEAD, *_exits(), *_signals(), *_nccl(), *_cuda(), *_xids(), *_sxids(), *_causes()]
    return "\n".join(parts)


def _exits() -> list[str]:
    rows = [f"| {number} | {cell(what)} | {action} |" for number, (what, action) in sorted(EXITS.items())]
    return [
        "## Exit codes",
        "",
        "128 + n is the end by signal n, as a shell tells it; a negative code -n is the same, as Python tells it. The",
        "codes of `keepstep run` have a [page of their own](exit-codes.md).",
        "",
        "| code | meaning | action |",
        "|---:|---|---|",
        *rows,
        "",
    ]


def _signals() -> list[str]:
    rows = [f"| {n} | {128 + n} | `{name}` | {cell(what)} | {act} |" for n, (name, what, act) in SIGNALS.items()]
    return ["## Signals", "", "| signal | exit code | name | meaning | action |", "|---:|---:|---|---|---|", *rows, ""]


def _nccl() -> list[str]:
    rows = [f"| {n} | `{name}` | {cell(what)} | {act} |" for n, (name, what, act) in NCCL.items()]
    return ["## NCCL results", "", "| number | name | meaning | action |", "|---:|---|---|---|", *rows, ""]


def _cuda() -> list[str]:
    rows = [
        f"| {n} | `{name}` | `{driver_name(name)}` | {cell(what)} | {act} |" for n, (name, what, act) in CUDA.items()
    ]
    return [
        "## CUDA errors",
        "",
        "| number | runtime | driver | meaning | action |",
        "|---:|---|---|---|---|",
        *rows,
        "",
    ]


def _xids() -> list[str]:
    rows = []
    for number, (name, first, _) in sorted(XIDS.items()):
        rule = xid_rule(number, True)
        rows.append(f"| {number} | `{name}` | {rule.category} | {rule.action} | {first or '-'} |")
    return [
        "## Xid",
        "",
        "Of NVIDIA's driver, in the kernel log. Category and action are what such a line alone says when it is severe; NVIDIA's",
        "column is the immediate action of its catalogue.",
        "",
        "| Xid | name | category | action | NVIDIA |",
        "|---:|---|---|---|---|",
        *rows,
        "",
    ]


def _sxids() -> list[str]:
    rows = []
    for number, (name, may_be_fatal, _) in sorted(SXIDS.items()):
        rule = sxid_rule(number, may_be_fatal)
        rows.append(f"| {number} | {cell(name)} | {'yes' if may_be_fatal else 'no'} | {rule.action} |")
    return [
        "## SXid",
        "",
        "Of NVSwitch, in the kernel log. The action is for a line that says that it is fatal, where one may.",
        "",
        "| SXid | name | may be fatal | action |",
        "|---:|---|---|---|",
        *rows,
        "",
    ]


def _causes() -> list[str]:
    kept: dict[str, Rule] = {}
    for rule in RULES:
        if rule.role in ("initiating", "symptom"):
            kept.setdefault(rule.id, rule)
    rows = [f"| `{id}` | {one.category} | {cell(one.says)} | {one.action} |" for id, one in sorted(kept.items())]
    return [
        "## Causes",
        "",
        "Names that a diagnosis gives, before it weighs them against the rest of the log.",
        "",
        "| cause | category | meaning | action |",
        "|---|---|---|---|",
        *rows,
        "",
    ]


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("{", "`{").replace("}", "}`") if "{" in text else text.replace("|", "\\|")
