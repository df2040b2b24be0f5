"""Lines that a collector has wrapped: JSON objects and ``key=value`` pairs, as fluentd, Loki, journald and zap write.

What the program said is taken out, with the node, the rank and the time that stand beside it. A wrapped message may
hold several lines, such as a whole stack.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
from msgspec import Struct

LONGEST = 20_000
"""Characters of a line that is opened."""
LINES_INSIDE = 400
_MESSAGE = ("message", "msg", "log", "text", "MESSAGE", "textPayload", "event", "body")
_MORE = ("exc_info", "exception", "stack_trace", "stacktrace", "traceback", "stack", "error")
_NODE = (
    "host",
    "hostname",
    "node",
    "node_name",
    "nodename",
    "nodeName",
    "_HOSTNAME",
    "instance",
    "machine",
    "server",
    "host_name",
    "host.name",
    "k8s.node.name",
)
_RANK = ("rank", "global_rank", "RANK", "process_index", "proc_rank", "world_rank")
_TIME = ("ts", "time", "timestamp", "@timestamp", "asctime", "datetime")
_WITHIN = (
    "kubernetes",
    "labels",
    "jsonPayload",
    "fields",
    "extra",
    "attributes",
    "resource",
    "record",
    "k8s",
    "stream",
)
_PAIR = re.compile(r'\s?([A-Za-z_][\w.@]{0,30})=("(?:[^"\\]|\\.)*"|[^\s"]*)')


class Opened(Struct, frozen=True, kw_only=True):
    """What was inside.

    Attributes:
        lines: of the message; never empty.
        when: the time as it was written, to be read like that of any line.
    """

    lines: list[str]
    node: str = ""
    rank: int | None = None
    when: str = ""


def opened(text: str) -> Opened | None:
    """The content of a wrapped line; ``None`` for every other line."""
    if len(text) > LONGEST or ("=" not in text and "{" not in text):
        return None
    if text.rstrip().endswith("}"):
        return _json(text)
    return _pairs(text)


def _json(text: str) -> Opened | None:
    start = text.find("{")
    if start > 80 or '"' not in text:
        return None
    try:
        found = msgspec.json.decode(text[start:].encode("utf-8", "replace"))
    except (msgspec.DecodeError, RecursionError):
        return None
    return _read(found, text[:start]) if isinstance(found, dict) else None


def _pairs(text: str) -> Opened | None:
    found: dict[str, Any] = {}
    at = 0
    while match := _PAIR.match(text, at):
        key, value = match[1], match[2]
        found.setdefault(key, value[1:-1].replace('\\"', '"').replace("\\n", "\n") if value[:1] == '"' else value)
        at = match.end()
    if len(found) < 2 or not any(key in found for key in (*_MESSAGE, *_NODE, *_RANK)):
        return None
    rest = text[at:].strip(" :|")
    if rest:
        found["message"] = f"{found['message']} {rest}" if found.get("message") else rest
    return _read(found, "")


def _read(fields: dict[str, Any], before: str) -> Opened | None:
    every = dict(fields)
    for key in _WITHIN:
        if isinstance(inner := fields.get(key), dict):
            every = {**inner, **every}
    message = _first(every, _MESSAGE)
    if not message:
        return None
    parts = [message, *(value for key in _MORE if (value := _text(every.get(key))) and value != message)]
    lines = [line for part in parts for line in part.split("\n") if line.strip()][:LINES_INSIDE]
    rank = _first(every, _RANK)
    label = before.strip()
    return Opened(
        lines=[f"{label} {line}" if label and not line.startswith(" ") else line for line in lines] or [message],
        node=_first(every, _NODE),
        rank=int(rank) if rank.isdecimal() and len(rank) < 7 else None,
        when=_first(every, _TIME),
    )


def _first(fields: dict[str, Any], keys: tuple[str, ...]) -> str:
    return next((value for key in keys if (value := _text(fields.get(key)))), "")


def _text(value: object) -> str:
    if isinstance(value, str):
        return value
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else ""
