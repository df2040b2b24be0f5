"""Culprit: node, GPU, rank, file and line of a cause, as far as the log lets one know."""

from __future__ import annotations

import re

from keepstep.core.diagnose import places as where
from keepstep.core.diagnose.cause import Cause
from keepstep.core.diagnose.observe import Log
from keepstep.core.diagnose.result import Culprit

NEAR_LINES = 4
"""Lines around a fault of the data in which its file may be named."""
_TELLING = ("mig", "stale_process", "foreign_process", "only_here")
"""Notes whose node is the culprit's."""
_PATH = re.compile(
    r"'([^'\s]*/[^'\s]+)'|(?<![\w/])(/(?!PCI)[\w.@+-]+(?:/[\w.@+:-]+)+)|\b([\w-]+\.(?:tar|parquet|jsonl|distcp|safetensors|pt|bin)\S*)"
)
_SHARD = re.compile(
    r"\b(?:shard|file|dataset)s? ([\w./:-]*\d[\w./:-]*)|\b(?:sample|record|batch|document)s? ([\w./:-]*\d[\w./:-]*)",
    re.IGNORECASE,
)


def culprit_of(cause: Cause, log: Log) -> Culprit:
    lead = cause.findings[0]
    everywhere = cause.category in ("user_code", "data") and len({one.rank for one in cause.findings}) > 2
    node = next((one.node for one in cause.findings if one.node), "")
    rank = next((one.rank for one in cause.findings if one.rank is not None), None)
    gpu = next((one.gpu for one in cause.findings if one.gpu), "")
    if node and cause.category == "infrastructure":
        beside = [one for found in log.findings.values() for one in found if one.node == node]
        beside.sort(key=lambda one: not one.rule.id.startswith("gpu"))
        gpu = gpu or next((one.gpu for one in beside if one.gpu and one.rule.category == "infrastructure"), "")
        if rank is None:
            rank = next((one.rank for one in beside if one.rank is not None and one.rule.role == "symptom"), None)
    frame = next((one.frame for one in cause.findings if one.frame), None)
    if frame is None and cause.category in ("user_code", "data") and len(log.frames) >= 1:
        frame = log.frames[0][1]
    if not node and rank is not None:
        node = log.places.node_of.get(rank, "")
    if (
        not node
        and cause.category == "infrastructure"
        and cause.action in ("replace_node", "isolate_and_verify", "restart_in_place")
    ):
        node = _only_node(cause, log)
    if rank is None and cause.category == "infrastructure" and node:
        here = [r for r, n in log.places.node_of.items() if n == node]
        rank = here[0] if len(here) == 1 else _sole_sufferer(log)
    thing = _field(cause, "thing") or _thing(cause, log)
    return Culprit(
        node="" if where.is_node_range(node) else node,
        gpu=gpu if cause.category in ("infrastructure", "transient") or not everywhere else "",
        rank=None if everywhere else rank,
        file=_field(cause, "file") or (frame.file if frame else ""),
        line=frame.line if frame else None,
        peer=_field(cause, "peer") or (where.address(lead.text) if "rdma" in cause.id or "peer" in cause.id else ""),
        link=_field(cause, "link"),
        thing=thing,
    )


def _field(cause: Cause, name: str) -> str:
    return next((one.fields[name] for one in cause.findings if one.fields.get(name)), "")


def _only_node(cause: Cause, log: Log) -> str:
    """The one node that faults, notes or lines speak of, when exactly one is spoken of."""
    told = [
        one.node
        for id, found in log.findings.items()
        if log.role(id) in ("initiating", "symptom") and found[0].rule.category == cause.findings[0].rule.category
        for one in found
        if one.node
    ]
    noted = [one.node for tag in _TELLING for one in log.tags.get(tag, ()) if one.node]
    for named in (told, noted, list(log.places.speakers), list(log.places.nodes)):
        if len(set(named)) == 1 and not where.is_node_range(named[0]):
            return named[0]
    return noted[0] if noted else ""


def _sole_sufferer(log: Log) -> int | None:
    """The rank with an error of its own, when exactly one has one."""
    own = {one.rank for id, found in log.findings.items() if log.role(id) in ("initiating", "symptom") for one in found}
    own.discard(None)
    return own.pop() if len(own) == 1 else None


def _thing(cause: Cause, log: Log) -> str:
    texts = [one.text for one in cause.findings[:3]]
    if cause.category == "data":
        own = next((name for name in map(where.data_file, texts) if name), "")
        near = [name for number, name in log.data_files if abs(number - cause.findings[0].number) <= NEAR_LINES]
        if own or near:
            return own or near[-1]
        texts += [one.text for one in log.findings.get("bad_sample", ())[:3]] + [
            one.text for one in log.findings.get("token_id_out_of_range", ())[:2]
        ]
        for text in texts:
            if found := max(_SHARD.findall(text), key=lambda pair: len(pair[0]), default=()):
                return str(found[0] or found[1]).strip(".:,")
    for text in texts:
        for groups in _PATH.findall(text):
            path = next(str(part) for part in groups if part)
            if not path.endswith((".py", ".cpp", ".cc", ".cu", ".hpp")) and ".py:" not in path:
                return path.strip("'\",.;:")
    return ""
