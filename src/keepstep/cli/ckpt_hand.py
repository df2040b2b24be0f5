"""``keepstep ckpt restore``, ``export`` and ``import``: checkpoints handed over to other places and other formats."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

from keepstep.checkpoint import imported, words
from keepstep.checkpoint.exceptions import CheckpointError
from keepstep.checkpoint.export_safetensors import FILE_BYTES, Folder, export, look
from keepstep.checkpoint.reader import Reader
from keepstep.checkpoint.room import show as size_of
from keepstep.checkpoint.slot import Version
from keepstep.checkpoint.tiers.directory import MARKER
from keepstep.checkpoint.tiers.open import is_directory
from keepstep.checkpoint.whole import Whole
from keepstep.cli.ckpt_made import endable, target
from keepstep.cli.ckpt_place import PATIENCE_S, Place, bar, door, pick
from keepstep.cli.errors import DoorError, UsageError
from keepstep.cli.render import Column, check_form, show
from keepstep.cli.say import say

Format = Literal["dcp", "safetensors"]
COLUMNS = (Column("STEP", "step"), Column("FORMAT", "format"), Column("SIZE", "size"), Column("TO", "to"))


def restore(at: Place, step: int | None, to: str, output: str) -> int:
    """One generation elsewhere, in full, resting on nothing: safetensors shards of all its ranks."""
    form, where = check_form(output), _where(to)
    with door(at.tier):
        found = pick(at.tier, step)
    what = f"step {found.version.step}"
    with door(at.tier, found):
        reader = Reader([at.tier], found.version, told=lambda damage: say(damage.why))
        total = sum(reader.part(rank).payload for rank in range(found.world_size))
        with target(where, "keepstep ckpt restore", PATIENCE_S) as tier, bar(what, total) as told:
            imported.copy(reader, tier, progress=told, told=say)
    return _told("CheckpointRestored", found.version.step, "keepstep", total, to, form)


def export_to(at: Place, step: int | None, to: str, format: Format, weights_only: bool, output: str) -> int:
    form = check_form(output)
    directory = _directory(to)
    if os.path.exists(directory / MARKER):
        raise DoorError(f"--to {to} holds checkpoints of keepstep", help="name a folder of its own for the export")
    with door(at.tier):
        found = pick(at.tier, step)
    more: dict[str, Any] = {}
    with door(at.tier, found), endable():
        whole = Whole(Reader([at.tier], found.version, told=lambda damage: say(damage.why)))
        wanted = [one for one in whole.tensors if not (weights_only and one.kind == "o")]
        with bar(f"step {found.version.step}", sum(one.nbytes for one in wanted)) as told:
            if format == "dcp":
                total = _dcp().export(whole, directory, weights_only=weights_only, progress=told, told=say)
            else:
                done = export(
                    whole, directory, weights_only=weights_only, file_bytes=FILE_BYTES, progress=told, told=say
                )
                total, more = done.bytes, {"files": list(done.files), "as_bytes": list(done.as_bytes)}
                if done.as_bytes:
                    say(f"{len(done.as_bytes)} tensors have a dtype that safetensors does not know; kept as bytes (U8)")
    return _told("CheckpointExported", found.version.step, format, total, to, form, **more)


def import_from(
    source: str,
    to: str,
    step: int,
    format: Format,
    *,
    job: str,
    model: str,
    optimizer: str,
    also: tuple[str, ...],
    output: str,
) -> int:
    form = check_form(output)
    if not 0 <= step <= words.MAX_COUNT:
        raise UsageError(
            f"--step {step} must be 0 or more, and {words.MAX_COUNT} or less",
            help="the number of steps that the checkpoint stands for",
        )
    where = _where(to)
    directory, dcp = _directory(source), _dcp() if format == "dcp" else None
    payload = None if dcp else _weights(directory, model)
    with door():
        with (
            target(where, "keepstep ckpt import", PATIENCE_S) as tier,
            bar(f"step {step}", 0) as told,
        ):
            if payload is not None:
                manifest = imported.write(
                    tier, Version(step, 0), payload, job=job, plain=imported.plain(), progress=told, told=say
                )
            else:
                assert dcp is not None
                names = {"model": model, "optimizer": optimizer, "also": also}
                manifest = dcp.import_dcp(directory, tier, step=step, job=job, progress=told, told=say, **names)
    return _told("CheckpointImported", step, format, sum(part.bytes for part in manifest.parts), to, form)


def _weights(directory: Path, model: str) -> Folder:
    try:
        return Folder(look(directory), model)
    except CheckpointError as error:
        raise DoorError(
            str(error), help="name a folder of *.safetensors, or one such file; --format dcp takes a DCP folder"
        ) from error


def _where(to: str) -> str:
    """The place to write to, as the engine spells it."""
    if not to:
        raise UsageError("--to is empty", help="a path, or a URL such as s3://bucket/prefix")
    with door():
        return words.place(to, "--to") if is_directory(to) else to


def _directory(text: str) -> Path:
    if not text:
        raise UsageError("an empty name is no folder", help="name a directory of this machine")
    if "://" in text:
        raise UsageError(
            f"{text}: exports are read and written on a file system", help="name a directory, then copy it"
        )
    return Path(text).expanduser().absolute()


def _dcp() -> Any:
    try:
        from keepstep.trainer import export_torch
    except ImportError as error:
        raise DoorError(
            f"--format dcp needs torch ({error})", help="pip install 'keepstep[torch]', or use --format safetensors"
        ) from error
    return export_torch


def _told(schema: str, step: int, format: str, total: int, to: str, form: Any, **more: Any) -> int:
    row = {"step": step, "format": format, "bytes": total, "size": size_of(total), "to": to, **more}
    show({"schema": f"keepstep.v1/{schema}", **row}, [row], COLUMNS, form)
    return 0
