"""The cause of an incident in an incident's text: what the words of its processes were read as, and which words."""

from __future__ import annotations

from collections.abc import Sequence

from keepstep.model.records import SuspectNamed

SAID = " | "
"""Stands between a process (``node:rank``) and its words in evidence that was taken from output."""


def cause_lines(guilty: SuspectNamed | None) -> list[str]:
    """The cause by name, how to look it up, and what it means for the node."""
    if guilty is None or not guilty.root_cause:
        return []
    name = guilty.root_cause.partition(":")[0]
    word = guilty.code or name
    quoted = f"'{word}'" if " " in word else word
    lines = [f"cause:  {name} ({guilty.category}); keepstep explain {quoted}"]
    if guilty.leave and guilty.node:
        lines.append(
            f"        a process of {guilty.node} itself says that the node is broken: its ranks are to leave it"
        )
    return lines


def said_lines(suspects: Sequence[SuspectNamed]) -> list[str]:
    """Lines of output that were taken as evidence, each once, those of the first suspect first."""
    found = [
        f"said      {line}"
        for suspect in suspects
        if suspect.root_cause
        for line in suspect.evidence
        if SAID in line[:160]
    ]
    return list(dict.fromkeys(found))
