"""Taints: marks what this node's durable tiers hold of steps that a machine may have computed wrongly."""

from __future__ import annotations

import asyncio
import time

from keepstep.agent.node import Node
from keepstep.checkpoint import tainted
from keepstep.checkpoint.exceptions import CheckpointError, TierMissing
from keepstep.checkpoint.tiers.open import open_tier
from keepstep.model.actions import TaintCheckpoints
from keepstep.model.ids import Rank

BUDGET_S = 60.0
"""How long one operation of a tier that does not answer is tried again."""


async def carry_out(node: Node, action: TaintCheckpoints) -> str:
    """Mark, or take the marks away; a sentence when a tier could not be reached.

    The shared tier is left to the node of rank 0: a thousand nodes would all write the same there.
    """
    return await asyncio.to_thread(_carry_out, node, action)


def _carry_out(node: Node, action: TaintCheckpoints) -> str:
    policy = node.spec.ckpt
    first = any(seat.rank == Rank(0) for seat in node.seats())
    problems = []
    for url, label, mine in ((policy.local_dir, "local", True), (policy.dir, "remote", first)):
        if not url or not mine:
            continue
        try:
            tier = open_tier(url, label, budget_s=BUDGET_S)
            now = time.time_ns()
            if action.clear:
                steps = tainted.clear(tier, why=action.why, now_ns=now)
            else:
                steps = tainted.mark(
                    tier, since=action.since, until=action.until, why=action.why, now_ns=now, before_ns=action.before
                )
        except TierMissing:
            continue  # nothing was ever written there
        except CheckpointError as error:
            problems.append(str(error))
            continue
        if steps:
            said = ", ".join(str(version.step) for version in sorted(steps))
            what = "no longer tainted" if action.clear else "tainted"
            node.say(f"checkpoints of step {said} in {tier.where} are {what} ({action.why})")
    return "; ".join(problems)
