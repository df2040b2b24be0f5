"""Where the checkpoints of a command are, which generation is meant, and how its troubles and progress are told."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from keepstep.checkpoint import catalog, words
from keepstep.checkpoint.catalog import Generation
from keepstep.checkpoint.exceptions import (
    BadSetting,
    CheckpointError,
    GenerationIncomplete,
    LayoutMismatch,
    ManifestDamaged,
    PayloadDamaged,
    TierAway,
    TierDenied,
    TierMissing,
)
from keepstep.checkpoint.generation import manifest_name
from keepstep.checkpoint.tainted import allowed
from keepstep.checkpoint.tiers.open import is_directory, open_tier
from keepstep.cli.errors import DoorError, NotFound, UsageError
from keepstep.cli.say import say
from keepstep.model.settings import CheckpointPolicy
from keepstep.ports.tier import Tier

PATIENCE_S = 10.0
"""How long one operation of a tier that does not answer is tried again while a person waits."""
Told = Callable[[int], None]


class Place(NamedTuple):
    """A tier, and the policy of the job that writes to it, where that is known."""

    tier: Tier
    policy: CheckpointPolicy | None = None


def place(url: str, job: str, state_dir: str = "") -> Place:
    """The tier that a URL names, or that a job of this machine writes to (the shared one before the local one).

    Raises:
        DoorError: neither or both are named, there is no such place, or it cannot be read.
    """
    if url and job:
        raise UsageError(f"{url} and --job {job} name two places", help="leave one out")
    if not url and not job:
        raise UsageError(
            "say where the checkpoints are: a path or URL, or --job NAME",
            help="for example: keepstep ckpt ls /data/checkpoints",
        )
    policy = None
    label = "remote"
    if job:
        policy = _policy_of(job, state_dir)
        url, label = (policy.dir, "remote") if policy.dir else (policy.local_dir, "local")
        if not url:
            raise NotFound(
                f"job {job} keeps no durable checkpoints", help="give --ckpt-dir to keepstep run, or name a path or URL"
            )
    if is_directory(url) and os.path.isfile(url):
        raise NotFound(f"{url} is a file", help="name the directory given as --ckpt-dir")
    with door():
        return Place(open_tier(url, label, budget_s=PATIENCE_S), policy)


def _policy_of(job: str, state_dir: str) -> CheckpointPolicy:
    import msgspec

    from keepstep.cli import dirs
    from keepstep.cli.source import find_run, node_configs

    run = find_run(dirs.state_dir(state_dir or None), job)
    for config in node_configs(run):
        spec = config.get("spec")
        if isinstance(spec, dict) and "ckpt" in spec:
            try:
                return msgspec.convert(spec["ckpt"], CheckpointPolicy)
            except msgspec.ValidationError as error:
                raise NotFound(f"{run}: its settings cannot be read: {error}", help="name a path or URL") from error
    raise NotFound(f"{run} does not say where its checkpoints are", help="name a path or URL")


def pick(tier: Tier, step: int | None, *, damaged: bool = False) -> Generation:
    """The generation of a step, or the newest complete one. Newer ones that are passed over as damaged are told.

    Args:
        damaged: one that was found damaged will do, when it is asked for by its step.

    Raises:
        NotFound: there is none; says what there is instead.
    """
    found = catalog.read(tier)
    if not found:
        raise NotFound(f"there are no checkpoints in {tier.where}", help="is it the directory given as --ckpt-dir?")
    usable = [one for one in found if one.complete and (allowed() or not one.tainted)]
    if step is None:
        if usable:
            for one in found:
                if (one.damaged or one.tainted) and one.version > usable[0].version:
                    say(f"step {one.version.step} is passed over: {one.why}")
            return usable[0]
        unfit = "; ".join(f"step {one.version.step}: {one.why}" for one in found[:3])
        raise NotFound(f"no checkpoint in {tier.where} is complete: {unfit}", help="`keepstep ckpt ls` lists them")
    at = [one for one in found if one.version.step == step]
    if not at:
        near = min(usable or found, key=lambda one: abs(one.version.step - step)).version.step
        raise NotFound(f"{tier.where} holds no step {step}", help=f"the nearest is --step {near}")
    best = next((one for one in at if one.complete), at[0])
    if not best.complete and not (damaged and best.world_size):
        raise NotFound(f"step {step} in {tier.where} cannot be used: {best.why}", help=older(tier, best))
    return best


def older(tier: Tier, than: Generation) -> str:
    """The way out when a generation is damaged: the next older one that is complete."""
    for one in catalog.read(tier):
        if one.complete and one.version < than.version:
            return f"the next older complete one is --step {one.version.step}"
    return "there is no older complete one in this place; another tier or an export may have it"


@contextmanager
def door(tier: Tier | None = None, of: Generation | None = None) -> Iterator[None]:
    """The engine's errors as a person's: one sentence, and the way out."""
    try:
        yield
    except BadSetting as error:
        raise UsageError(error.args[0], help=error.help) from error
    except (PayloadDamaged, ManifestDamaged, LayoutMismatch, GenerationIncomplete, TierMissing) as error:
        if tier is not None and of is not None and _is_gone(tier, of):
            raise DoorError(
                f"step {of.version.step} was removed from {tier.where} while it was read", help=older(tier, of)
            ) from error
        if isinstance(error, TierMissing):
            raise NotFound(
                str(error), help="check the path or URL; a job's is told by `keepstep ckpt ls --job NAME`"
            ) from error
        help = older(tier, of) if tier is not None and of is not None else "`keepstep ckpt ls` shows what is complete"
        raise DoorError(f"damaged: {error}", help=help) from error
    except TierDenied as error:
        raise DoorError(str(error), help="check spelling, permissions and credentials") from error
    except TierAway as error:
        raise DoorError(str(error), help="try again when the file system or the network is back") from error
    except CheckpointError as error:
        raise DoorError(str(error)) from error


def _is_gone(tier: Tier, of: Generation) -> bool:
    """Whether a generation that was there has been removed meanwhile."""
    try:
        tier.size(manifest_name(of.version))
    except TierMissing:
        return True
    except CheckpointError:
        return False
    return False


@contextmanager
def bar(what: str, total: int) -> Iterator[Told]:
    """A progress bar with rate and time left on a terminal; nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda size: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=total or None)
        yield lambda size: progress.advance(task, size)


def confirm(question: str, yes: bool) -> bool:
    """Ask on a terminal; elsewhere only ``--yes`` counts."""
    if yes:
        return True
    if not sys.stdin.isatty():
        raise UsageError(f"{question} Nobody can be asked here", help="give --yes, or look first with --dry-run")
    return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")


def kept(keep: int | None, keep_every: int | None, keep_for: str, sdc_window: str) -> CheckpointPolicy | None:
    """The retention that was said; ``None`` where nothing was."""
    if keep is None and keep_every is None and not keep_for and not sdc_window:
        return None
    said = {"keep": keep, "keep_every": keep_every}
    given = {key: value for key, value in said.items() if value is not None}
    with door():
        return words.policy(
            {"keep": 1, **given, "keep_for": keep_for, "sdc_window": sdc_window},
            lambda key: f"--{key.replace('_', '-')}",
        )
