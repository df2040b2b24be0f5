"""One round of the writer, and the order in which its parts may become durable and visible.

After ``Ready`` of etcd's raft: every field says what has to have happened before it may be acted upon.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from keepstep.model.facts import AnyFact
from keepstep.ports import Entry


@dataclass(eq=False)
class Submission:
    """Facts that arrived together, from one agent's frame, one timer or one person.

    Attributes:
        facts: decided in this order, without facts of others in between.
        durable: called once, after the batch that holds the last fact has been committed (or when all facts turned out
            to be repetitions of durable ones). An agent's reports are acknowledged here.
        outcome: for a person who waits for the answer: the entries that the facts led to.
    """

    facts: tuple[AnyFact, ...]
    durable: Callable[[], None] | None = None
    outcome: asyncio.Future[list[Entry]] | None = None


@dataclass(eq=False)
class Batch:
    """What one commit holds. The fields are in the order in which they take effect.

    Attributes:
        submissions: taken from the queue, in order of arrival. Still in memory only; if the process dies now, agents
            send them again from their outboxes, and people see their request fail.
        entries: what the mind made of them, folded into the *staged* mind alone. Nobody but the writer has seen them.
            They are appended in one transaction; **the commit returns only when they are on stable storage**.
            If it fails, the staged mind is thrown away and the same submissions are decided afresh later.
        (then, on the event loop, without yielding:)
        1. entries are folded into the *durable* mind, the one that agents' reconnects and the API read.
        2. orders among the entries go to the agents. They may be lost from here on: the log has them, and they are
           repeated to an agent that reconnects until it has reported them done.
        3. agents' reports are acknowledged and may be forgotten by them; people get their answers.
        4. readers that wait for news are woken.
        (and when nothing waits in the queue or enough entries have come together:)
        5. a snapshot of the durable mind is saved. It only makes the next start faster.
    """

    submissions: list[Submission]
    entries: list[Entry] = field(default_factory=list)
    outcomes: list[tuple[asyncio.Future[list[Entry]], list[Entry]]] = field(default_factory=list)
