"""Leaning: what an unknown log is about, by its words, when no rule knows a line of it.

A weak hint and marked as one: the confidence is low, and nobody is evicted or stopped for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from keepstep.core.diagnose.result import Category

LEAST_WORDS = 2
"""Different words of one field, before it is named."""
LEAD = 1.5
"""Times as many as of the next field."""
_FIELDS: dict[Category, re.Pattern[str]] = {
    "infrastructure": re.compile(
        r"\b(?:nodes?|hosts?|gpus?|nics?|links?|ports?|disks?|drives?|fans?|psus?|bmc|bios|firmware|drivers?|kernel|switch\w*|cables?|"
        r"slots?|dimms?|cpus?|sockets?|power|temperature|rack|pdu|hca|xid|ecc|pcie|reboot\w*)\b",
        re.IGNORECASE,
    ),
    "user_code": re.compile(
        r"\b(?:configs?|scripts?|arguments?|options?|flags?|versions?|imports?|modules?|env(?:ironment)?|launch\w*|commits?|code|parameters?|"
        r"optimi[sz]ers?|seeds?|lr|num_workers|accounts?|typos?|functions?|class|method|tensors?|shapes?|dtypes?|user|submission)\b",
        re.IGNORECASE,
    ),
    "data": re.compile(
        r"\b(?:samples?|shards?|documents?|records?|datasets?|corpus|jsonl|parquet|tars?|labels?|tokens?|captions?|utterances?|rows?|index(?:es)?|"
        r"manifest|vocab\w*)\b",
        re.IGNORECASE,
    ),
    "transient": re.compile(
        r"\b(?:retr(?:y|ied|ies)|later|temporar\w+|outage|preempt\w*|queued?|reclaim\w*|requeue\w*|back-?off|flapp?\w*|briefly)\b",
        re.IGNORECASE,
    ),
}


def leaning(texts: Iterable[str]) -> Category:
    """The field that most of the words are of; ``unknown`` without a clear lead."""
    lines = list(texts)
    counts = {
        field: len({word.lower().rstrip("s") for line in lines for word in pattern.findall(line)})
        for field, pattern in _FIELDS.items()
    }
    first, second = sorted(counts, key=lambda field: -counts[field])[:2]
    clear = counts[first] >= LEAST_WORDS and counts[first] >= LEAD * counts[second]
    return first if clear else "unknown"
