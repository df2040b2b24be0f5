"""Culprit: node, GPU, rank, file and line of a cause, as far as the log lets one know."""

from __future__ import annotations

import re
from collections import Counter

from keepstep.core.diagnose import places as where
from keepstep.core.diagnose.cause import Cause
from keepstep.core.diagnose.observe import Log
from keepstep.core.diagnose.pairs import slow_end
from keepstep.core.diagnose.result import Culprit
from keepstep.core.diagnose.rules import GENERIC
from keepstep.core.diagnose.stacks import Frame

NEAR_LINES = 4
"""Lines around a fault of the data in which its file may be named."""
_TELLING = ("mig", "stale_process", "foreign_process", "only_here")
"""Notes whose node is the culprit's."""
_OF_DEVICE = re.compile(
    r"(?:CUDA|HIP|XPU|NPU) error|AcceleratorError|HSA_STATUS|uncorrectable|cudaError|Bus error|SIGBUS", re.IGNORECASE
)
_ORIGIN = re.compile(
    r"\b(?:from|in|of|reading|file|source|part|shard) [\"'\[]?((?:[\w.-]+/)*[\w.-]*?(?:part|shard|chunk|split|bucket|file|crawl|dump|web|book|code|doc)\w*[-_/]\d[\w.-]*)|\b(?:in|opening|reading|loading|file|from|of) [\"']?((?:\w{2,5}://|/)[\w./@+-]*[\w-])",
    re.IGNORECASE,
)
"""Where samples come from, by the words that stand before names without an ending."""
_SHARD_NAME = re.compile(r"\b[\w.-]{0,60}(?:shard|part|chunk)[-_]\d[\w.-]{0,60}\b(?<!\.)", re.IGNORECASE)
_NATIVE_PLACE = re.compile(r"(/(?!pytorch|opt/pytorch|build)[\w./+-]+\.(?:cu|cuh|cpp|cc|c|rs|hpp|h)):(\d{1,9})")
_NATIVE = (".so", ".so.1", ".so.2", ".dll")
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
    node = (
        slow_end(one.text for one in cause.findings)
        or next((one.node for one in cause.findings if one.node), "")
        or _alike(cause, log)
    )
    rank = next((one.rank for one in cause.findings if one.rank is not None), None)
    gpu = next((one.gpu for one in cause.findings if one.gpu), "")
    if rank is None and cause.category in ("infrastructure", "transient"):
        rank = _sufferer(node, log)
    if not node and rank is not None:
        node = log.places.node_of.get(rank, "")
    if (
        not node
        and cause.category == "infrastructure"
        and cause.action in ("replace_node", "isolate_and_verify", "restart_in_place", "investigate")
    ):
        node = _only_node(cause, log)
    if node and cause.category == "infrastructure":
        gpu = gpu or _gpu_beside(node, log)
        if rank is None:
            rank = _sufferer(node, log)
    if not node and cause.category == "transient" and len(log.told_nodes) == 1:
        node = next(iter(log.told_nodes))
    if not gpu and rank is not None and cause.category == "infrastructure":
        gpu = log.places.gpu_of.get(rank, "")
    frame = next((one.frame for one in cause.findings if one.frame), None)
    if frame is None and cause.category in ("user_code", "data") and len(log.frames) >= 1:
        frame = log.frames[0][1]
    thing = _thing(cause, log) if lead.rule.id == GENERIC else _field(cause, "thing") or _thing(cause, log)
    native = _NATIVE_PLACE.fullmatch(thing) if cause.category == "user_code" and frame is None else None
    if native:
        frame = Frame(native[1], int(native[2]), "")
    return Culprit(
        node="" if where.is_node_range(node) else node,
        gpu=gpu if cause.category in ("infrastructure", "transient") or not everywhere else "",
        rank=None if everywhere else rank,
        file=(frame.file if frame and _field(cause, "file").endswith(_NATIVE) else _field(cause, "file"))
        or (frame.file if frame else ""),
        line=frame.line if frame else int(_field(cause, "line") or 0) or None,
        peer=_field(cause, "peer") or (where.address(lead.text) if "rdma" in cause.id or "peer" in cause.id else ""),
        link=_field(cause, "link"),
        thing=thing,
    )


def _alike(cause: Cause, log: Log) -> str:
    """A machine in the lines of the cause whose name is only known from others that are like it."""
    return next((name for one in cause.findings for name in log.places.named(one.text)), "")


def _gpu_beside(node: str, log: Log) -> str:
    """The GPU that the lines of this machine speak of: of a fault, or the only one that is spoken of at all."""
    beside = [one for found in log.findings.values() for one in found if one.node == node and one.gpu]
    beside.sort(key=lambda one: not one.rule.id.startswith("gpu"))
    if at_fault := next((one.gpu for one in beside if one.rule.category == "infrastructure" or "Xid" in one.text), ""):
        return at_fault
    named = log.gpus.get(node, Counter())
    addresses = [one for one in named if ":" in one]
    return addresses[0] if len(addresses) == 1 else next(iter(named)) if len(named) == 1 else ""


def _sufferer(node: str, log: Log) -> int | None:
    """The rank that died of the fault: on this machine, and by an error of its own rather than of the others.

    An error of the device says more than an exit code, and a rank that is spoken of alone more than none.
    """
    own = [
        one
        for id, found in log.findings.items()
        if log.role(id) in ("initiating", "symptom")
        for one in found
        if one.rank is not None
    ]
    of_device = [one for one in own if _OF_DEVICE.search(one.text)]
    spoken = [one for one in own if node and one.node == node]
    for among in (of_device, spoken, own):
        here = {one.rank for one in among if one.rank is not None and _may_be_on(one.rank, node, log)}
        if len(here) == 1:
            return here.pop()
    told = {rank for rank in log.told if _may_be_on(rank, node, log)}
    told = told if len(told) == 1 else told - {0}
    if len(told) == 1:
        return told.pop()
    at_home = [rank for rank, home in log.places.node_of.items() if home == node] if node else []
    return at_home[0] if len(at_home) == 1 else None


def _may_be_on(rank: int, node: str, log: Log) -> bool:
    """Whether nothing places the rank on another machine."""
    return not node or log.places.node_of.get(rank, node) == node


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
    for named in (told, noted, list(log.told_nodes), list(log.places.speakers), list(log.places.nodes)):
        if len(set(named)) == 1 and not where.is_node_range(named[0]):
            return named[0]
    return noted[0] if noted else ""


def _thing(cause: Cause, log: Log) -> str:
    texts = [one.text for one in cause.findings[:3]]
    if cause.category == "data":
        own = next((name for name in map(where.data_file, texts) if name), "")
        near = [name for number, name in log.data_files if abs(number - cause.findings[0].number) <= NEAR_LINES]
        named = Counter(
            name for _, name in log.data_files if "/" in name or not name.endswith((".json", ".txt", ".bin"))
        )
        if own or near or named:
            return own or (near[-1] if near else named.most_common(1)[0][0])
        texts += [line.text for line in log.tail if line.text not in texts]
        for text in texts if "checkpoint" not in cause.id else ():
            if origin := _ORIGIN.search(text):
                return origin[1] or origin[2]
        for text in texts if "checkpoint" not in cause.id else ():
            if name := _SHARD_NAME.search(text):
                return name[0]
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
