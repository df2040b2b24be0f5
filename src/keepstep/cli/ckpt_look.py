"""``keepstep ckpt ls``, ``show``, ``verify`` and ``gc``: what is there, whether it is sound, and what may go."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

from keepstep.checkpoint import archive, catalog, collect, lease
from keepstep.checkpoint.catalog import Generation
from keepstep.checkpoint.exceptions import GenerationIncomplete, ManifestDamaged, PayloadDamaged
from keepstep.checkpoint.room import show as size_of
from keepstep.cli.ckpt_made import endable, held
from keepstep.cli.ckpt_place import Place, bar, confirm, door, older, pick
from keepstep.cli.errors import DoorError, UsageError
from keepstep.cli.render import Column, check_form, show
from keepstep.cli.say import plural, say
from keepstep.cli.show import age
from keepstep.model.settings import CheckpointPolicy
from keepstep.ports.tier import Tier

SCHEMA = "keepstep.v1/"
COLUMNS = (
    Column("STEP", "step"),
    Column("STATE", "state"),
    Column("AGE", "age"),
    Column("RANKS", "world_size"),
    Column("SIZE", "size"),
    Column("RESTS ON", "bases"),
    Column("EPOCH", "epoch", wide=True),
    Column("JOB", "job", wide=True),
    Column("WHY", "why"),
)
PART_COLUMNS = (
    Column("RANK", "rank"),
    Column("KIND", "kind"),
    Column("RESTS ON", "base"),
    Column("SIZE", "size"),
    Column("TENSORS", "tensors"),
    Column("FILE", "file"),
)


def row(found: Generation, now_s: float) -> dict[str, Any]:
    """One generation, for people and programs."""
    state = "verified" if found.verified else "complete" if found.complete else "parts" if found.ranks else "unfinished"
    if not found.complete and not found.why.startswith("unfinished"):
        state = "damaged"
    if found.tainted and state != "damaged":
        state = "tainted"
    made = found.created_ns / 1e9
    created = datetime.fromtimestamp(made, UTC).isoformat() if made else None
    return {
        "step": found.version.step,
        "epoch": found.version.epoch,
        "state": state,
        "complete": found.complete,
        "verified": found.verified,
        "damaged": state == "damaged",
        "tainted": found.tainted,
        "created": created,
        "age_s": round(max(0.0, now_s - made), 1) if made else None,
        "age": age(created, now_s),
        "world_size": found.world_size or None,
        "bytes": found.bytes,
        "size": size_of(found.bytes) if found.bytes else None,
        "bases": [base.step for base in found.bases],
        "ranks": list(found.ranks),
        "replicated": found.replicated,
        "job": found.job,
        "why": found.why,
    }


def show_list(at: Place, output: str) -> int:
    form = check_form(output)
    with door():
        found = catalog.read(at.tier)
    rows = [row(one, time.time()) for one in found]
    show({"schema": f"{SCHEMA}CheckpointList", "where": at.tier.where, "generations": rows}, rows, COLUMNS, form)
    if not rows:
        say(f"there are no checkpoints in {at.tier.where}")
    return 0


def show_one(at: Place, step: int | None, tensors: bool, output: str) -> int:
    form = check_form(output)
    with door(at.tier):
        found = pick(at.tier, step, damaged=True)
        parts = [catalog.part(at.tier, found.version, rank) for rank in found.ranks]
    rows: list[dict[str, Any]] = [
        {
            "rank": part.rank,
            "kind": part.kind,
            "base": part.base.step if part.base else None,
            "bytes": part.size,
            "size": size_of(part.size),
            "payload_bytes": part.payload,
            "tensors": len(part.tensors),
            "file": part.file,
        }
        for part in parts
    ]
    answer: dict[str, Any] = {"schema": f"{SCHEMA}Checkpoint", "where": at.tier.where, **row(found, time.time())}
    answer["parts"] = rows
    if tensors:
        rows = [
            {
                "rank": part.rank,
                "name": entry.name,
                "dtype": entry.dtype,
                "shape": list(entry.shape),
                "of": list(entry.global_shape),
                "corner": list(entry.corner),
                "bytes": entry.nbytes,
            }
            for part in parts
            for entry in part.tensors
        ]
        answer["tensors"] = rows
    columns: tuple[Column, ...] = PART_COLUMNS
    if tensors:
        columns = tuple(Column(name.upper(), name) for name in ("rank", "name", "dtype", "shape", "of", "corner"))
    if form in ("table", "wide"):
        state = row(found, time.time())
        words = [f"step {state['step']}", state["state"], f"{state['age']} old", size_of(found.bytes)]
        words += [plural(found.world_size, "rank"), f"job {found.job}"]
        say(f"{at.tier.where}: {', '.join(words)}" + (f": {found.why}" if found.why else ""))
    show(answer, rows, columns, form)
    return 0


def verify(at: Place, step: int | None, every: bool, write: bool, output: str) -> int:
    """Read everything back; 1 when anything does not match."""
    form = check_form(output)
    with door(at.tier):
        there = {one.version: one for one in catalog.read(at.tier)}
        chosen = [one for one in there.values() if one.complete or one.damaged]
        if not every:
            chosen = [pick(at.tier, step, damaged=True)]
    if not chosen:
        raise DoorError(f"no checkpoint in {at.tier.where} is complete", help="`keepstep ckpt ls` lists them")
    wanted = {one.version: one for one in chosen}
    todo = list(chosen)
    while todo:  # what a difference rests on has to be sound, too
        for base in todo.pop().bases:
            if base not in wanted:
                wanted[base] = there.get(base) or Generation(version=base, why="it is gone")
                todo.append(wanted[base])
    ordered = sorted(wanted.values(), key=lambda one: one.version, reverse=True)
    rows = [_verify_one(at.tier, found, write) for found in ordered]
    bad = [found for found, one in zip(ordered, rows, strict=True) if not one["sound"]]
    answer = {
        "schema": f"{SCHEMA}CheckpointVerification",
        "where": at.tier.where,
        "sound": not bad,
        "generations": rows,
    }
    columns = tuple(Column(name.upper(), name) for name in ("step", "state", "size", "seconds", "why"))
    show(answer, rows, columns, form)
    if bad:
        say(older(at.tier, bad[-1]))
        if not write:
            say("with --write this is kept beside the checkpoint, and no restore takes it")
    return 1 if bad else 0


def _verify_one(tier: Tier, found: Generation, write: bool) -> dict[str, Any]:
    began, why = time.monotonic(), ""
    with door(), bar(f"step {found.version.step}", found.bytes) as told:
        try:
            archive.verify(tier, found.version, write=write, found=found, progress=told)
        except (GenerationIncomplete, ManifestDamaged, PayloadDamaged) as error:
            why = str(error)
    return {
        "step": found.version.step,
        "sound": not why,
        "state": "damaged" if why else "ok",
        "bytes": found.bytes,
        "size": size_of(found.bytes),
        "seconds": round(time.monotonic() - began, 2),
        "why": why,
    }


def gc(at: Place, policy: CheckpointPolicy | None, dry_run: bool, yes: bool, output: str) -> int:
    """Remove what retention does not keep, by the job's policy or the one that was said."""
    form = check_form(output)
    policy = policy or at.policy
    if policy is None:
        raise UsageError("say what to keep", help="for example --keep 3, or --job NAME for that job's own policy")
    alone = at.tier.label == "local"
    with door():
        found, now_ns = lease.read(at.tier), time.time_ns()
        if found is not None and lease.living(found, now_ns):
            why = lease.explain(found, at.tier.where, now_ns)
            if not dry_run:
                raise DoorError(
                    f"nothing is removed: {why}", help="a running job removes by its own policy; --dry-run looks"
                )
            say(f"this could not be done now: {why}")
        plan = collect.collect(at.tier, policy, by_itself=alone, dry_run=True)
    verdicts = sorted((*plan.kept, *plan.removed), key=lambda one: one.version, reverse=True)
    rows = [
        {"step": one.version.step, "epoch": one.version.epoch, "keep": one.keep, "why": one.why} for one in verdicts
    ]
    done, leftovers = False, 0
    if not verdicts:
        say(f"there are no checkpoints in {at.tier.where}")
    if not dry_run and plan.removed:
        steps = ", ".join(str(one.version.step) for one in plan.removed[:8]) + (
            ", ..." if len(plan.removed) > 8 else ""
        )
        if not confirm(f"Remove {plural(len(plan.removed), 'checkpoint')} (step {steps}) of {at.tier.where}?", yes):
            return 1
    if not dry_run:
        with door(), endable(), held(at.tier, "keepstep ckpt gc") as check:
            leftovers = collect.collect(at.tier, policy, by_itself=alone, check=check).leftovers
        done = True
        if leftovers:
            say(f"{plural(leftovers, 'leftover')} of interrupted writers removed")
    answer = {
        "schema": f"{SCHEMA}CheckpointCollection",
        "where": at.tier.where,
        "done": done,
        "removed": [one.version.step for one in plan.removed],
        "leftovers": leftovers,
        "generations": rows,
    }
    show(answer, rows, (Column("STEP", "step"), Column("KEEP", "keep"), Column("WHY", "why")), form)
    return 0
