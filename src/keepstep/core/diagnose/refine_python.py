"""Second thoughts on exceptions that no rule knows by name: the program's mistake, or what it was given to read."""

from __future__ import annotations

import re

from msgspec.structs import replace

from keepstep.core.diagnose import places as where
from keepstep.core.diagnose.cause import Cause, passing, spread
from keepstep.core.diagnose.observe import Finding, Log

DATA_POINTS = 2.5
"""Signs of bad data, after which the data is blamed and not the program."""
_OF_CONNECTIONS = ("ConnectionError", "TimeoutError", "RemoteDisconnected", "ProtocolError", "TemporaryFailureError")
"""Ends of the names of exceptions that speak of the network."""
_OF_VALUES = re.compile(
    r"(?:Value|Key|Index|OS|IO|Unicode\w*|JSON\w*|EOF|Assertion|Overflow|Runtime|Data\w*|Decod\w*|Pars\w*|Schema\w*|Arrow\w*|struct\.|Format\w*|Corrupt\w*"
    r"|Invalid\w*)(?:Error|Exception)|struct\.error|ArrowInvalid|InvalidData"
)
"""Kinds of exceptions that odd content can raise in a program that is right."""
_OF_CODE = re.compile(
    r"(?:Type|Attribute|Name|Import|Syntax|NotImplemented|Recursion|UnboundLocal|Indentation|ModuleNotFound)Error"
)
"""Kinds that say more of the program than of what it reads."""
_WORKER = re.compile(
    r"Caught \w+ in (?:DataLoader|pin memory|MapDataPipe|IterDataPipe)|DataLoader worker|data_?worker", re.IGNORECASE
)
_SAMPLE = re.compile(
    r"\b(?:samples?|records?|documents?|rows?|examples?|images?|utterances?|captions?|shards?|manifest|corpus|jsonl|parquet|tokens? ids?|"
    r"messages?|fields? [\"']|columns?|header|bytes? (?:at|in)|offset)\b",
    re.IGNORECASE,
)
_COUNTED = re.compile(
    r"\b\d[\d,]* (?:of|out of) [\d,]+ (?:samples|records|documents|rows|lines|files|examples|images|shards)|"
    r"(?:all|only) (?:in|from) \S*[/_.-]\S+|other (?:\d+ )?(?:files|shards|samples|sources)|\bline \d+ (?:of|in) \S+\.\w+|"
    r"(?:sha\d+|md5)sum|(?:differs?|deviates?) from (?:the )?manifest|added (?:today|yesterday)|re-?upload",
    re.IGNORECASE,
)
_SAME_POSITION = re.compile(
    r"(?:same|at the same|always at) (?:position|sample|batch|data|offset|index|document|record|line|step)|again at (?:sample|batch|step|the same)|"
    r"(?:skip\w*|without|exclud\w*|remov\w*|dropp\w*) .{0,40}(?:sample|shard|file|batch|document|part|record|line)",
    re.IGNORECASE,
)
_OF_SETTINGS = re.compile(
    r"\bcfg\b|\bconfig\b|\bargs?\.|argparse|hydra|omegaconf|state_dict|\.yaml|environ\b", re.IGNORECASE
)


def python(cause: Cause, log: Log) -> Cause:
    first = cause.findings[0]
    name = first.fields.get("thing", "Error").rpartition(".")[2]
    if name.endswith(_OF_CONNECTIONS):
        return passing(cause, "connection_lost", "retry_with_backoff", 0.5, "connections fail and come back")
    if signs_of_data(cause, name, log) >= DATA_POINTS:
        return replace(
            cause,
            id="bad_data_file",
            category="data",
            action="rollback_checkpoint_and_skip_data",
            says=f"reading the data raised {name}",
            weight=cause.weight + 0.22,
            why="it comes from reading samples, and not on every rank alike",
        )
    place = f" at {first.frame.file}:{first.frame.line}" if first.frame else ""
    weight = cause.weight + (0.18 if first.frame else 0.0)
    if log.first_stop is not None and first.number > log.first_stop:
        weight -= 0.3
    return replace(cause, says=f"the program raised {name}{place}", weight=weight)


def signs_of_data(cause: Cause, name: str, log: Log) -> float:
    """Points for the data, against the program. Each sign is of another kind, so that no single one decides."""
    texts = [one.text for one in cause.findings[:20]]
    around = [line.text for line in log.tail]
    points = 0.0
    if _OF_VALUES.search(name):
        points += 0.5
    if _OF_CODE.search(name):
        points -= 1.5
    if any(one.reading for one in cause.findings) or any(map(_WORKER.search, [*texts, *around])):
        points += 1.0
    if any(map(_names_data, cause.findings[:20])):
        points += 2.0
    elif any(where.data_file(text) and not text.startswith("  File") for text in around):
        points += 1.0
    if any(map(_SAMPLE.search, texts)):
        points += 0.5
    if any(map(_COUNTED.search, around)):
        points += 1.0
    if any(map(_SAME_POSITION.search, around)):
        points += 1.0
    if any(map(_OF_SETTINGS.search, texts)) or log.has("recent_change"):
        points -= 1.5
    if spread(cause, log):
        points -= 0.5
    return points


def _names_data(one: Finding) -> bool:
    file = where.data_file(one.text)
    return bool(file) and not file.endswith((".json", ".txt"))
