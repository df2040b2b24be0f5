"""Stragglers: ranks whose own time per step is longer than the others', window after window."""

from __future__ import annotations

from keepstep.core.draft import Draft
from keepstep.model.facts import RanksPaced


def ranks_paced(draft: Draft, fact: RanksPaced) -> None:
    """One node has told of its ranks' last window."""
