"""The first lines of a job: what runs where, what is watched, what is not, and the next command.

A newcomer's worst surprise is a watchdog that never watched. So what is *not* watched is said, and said first.
"""

from __future__ import annotations

from keepstep.checkpoint import room
from keepstep.cli.home import Home
from keepstep.cli.plan import Plan
from keepstep.cli.say import plural, say


def announce(plan: Plan, home: Home, nproc: int) -> None:
    assert home.address is not None
    nodes = f"{plan.min_nodes}:{plan.max_nodes}" if plan.min_nodes != plan.max_nodes else str(plan.max_nodes)
    world = f"{nodes} {'node' if nodes == '1' else 'nodes'} x {plural(nproc, 'rank')}"
    spares = [f"{plan.standbys} warm per node"] if plan.standbys else []
    spares += [plural(plan.standby_nodes, "spare node")] if plan.standby_nodes else []
    say(f"job {home.job}, node {home.node}: {world}; standby: {', '.join(spares) or 'none'}")
    where = f"{home.address.host}:{home.address.agent_port}"
    hosted = f"hosted here, pid {home.controller.pid}" if home.controller else "hosted elsewhere"
    say(f"controller {where} ({hosted}); log, output and losses in {home.run_dir}")
    limit = {"auto": "by each rank's own step times", "off": ""}.get(plan.hang_detect, f"after {plan.hang_detect}")
    silence = f"; ranks that go silent ({limit}), once the script uses keepstep.init" if limit else ""
    say(f"watched: processes that end or stand still{silence}")
    blind = "" if limit else "ranks that go silent (--hang-detect off); "
    say(f"NOT watched: {blind}scripts without keepstep.init that hang; devices, links, wrong numbers")
    if not plan.snapshot_every:
        say("NOT protected: --snapshot-every 0 keeps no state in memory, so a lost rank costs a restart of the job")
    for line in checkpoints(plan, nproc, room.free(home.root)):
        say(line)
    say("next: `keepstep status` in another terminal")


def checkpoints(plan: Plan, nproc: int, free_bytes: int) -> list[str]:
    """What is kept where, what memory that takes, and where a new start would begin."""
    ckpt = plan.ckpt
    lines = []
    if plan.snapshot_every:
        has_buddy = plan.max_nodes > 1 or plan.standby_nodes > 0
        durable = bool(ckpt.dir or ckpt.local_dir)
        kept = room.copies(has_buddy=has_buddy, durable=durable, full_every=ckpt.full_every)
        copies = sum(kept.values())
        listed = " + ".join(f"{number} {name}" for name, number in kept.items())
        most = room.show(free_bytes // (copies * nproc))
        lines.append(
            f"memory per rank: {copies} x its state ({listed}); {room.show(free_bytes)} free for "
            f"{plural(nproc, 'rank')}: at most {most} of state each"
        )
    places = [where for where in (ckpt.dir, f"{ckpt.local_dir} (each node's)" if ckpt.local_dir else "") if where]
    if places:
        differences = f", in full every {ckpt.full_every}" if ckpt.full_every > 1 else ""
        resumed = "a new start goes on from the newest" if ckpt.resume else "NOT resumed from (--no-resume)"
        lines.append(
            f"durable: every {plural(ckpt.every, 'step')} in {' and '.join(places)}{differences}; "
            f"{plural(ckpt.keep, 'generation')} kept; {resumed}"
        )
    else:
        lines.append("NOT protected: losing all nodes at once loses everything (--ckpt-dir keeps generations on disk)")
    return lines
