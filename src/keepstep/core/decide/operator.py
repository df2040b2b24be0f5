"""What people decide: each word is answered in the log, done or refused with a reason."""

from __future__ import annotations

from keepstep.core.draft import Draft
from keepstep.model.facts import OperatorSaid


def operator_said(draft: Draft, fact: OperatorSaid) -> None:
    """Carry out what a person asked for, or note why it cannot be."""
    draft.note(f"{fact.by} asked for {fact.verb} {fact.subject}".rstrip())
