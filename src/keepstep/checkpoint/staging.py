"""Staging: files of an export appear in their folder when all of them are whole, and none of them when it fails.

They are made in a hidden folder beside their place, under a lock that goes with the process, and then moved. What a
process that was killed has left, moved or not, is found by the next one, which removes it and begins anew. Only what
such an export has made itself is ever removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from keepstep.checkpoint.exceptions import CheckpointError
from keepstep.checkpoint.files import write_atomic

STAGE = ".keepstep-unfinished"
"""The hidden folder, in the one that the files are for."""
FILES, LOCK, MOVED = "files", "lock", "moved.json"
"""In it: what is being made, who is at work, and the names that are being moved to their place."""
LAST = (".metadata", ".index.json")
"""Files that make the others count (DCP's, and the index of safetensors) are moved behind them."""


@contextlib.contextmanager
def staged(directory: Path, told: Callable[[str], None] = lambda _: None) -> Iterator[Path]:
    """A folder to make files in. They move into ``directory`` when the block ends well, and are gone when it does not.

    Args:
        told: hears of what an interrupted export had left.

    Raises:
        CheckpointError: the folder cannot be made, somebody else is at work in it, or a name is taken there.
    """
    fresh = make_folders(directory)
    stage = directory / STAGE
    try:
        with _locked(stage):
            try:
                if _clear(directory, stage):
                    told(f"{directory} holds what an interrupted export has left; it is removed and made anew")
                files = stage / FILES
                files.mkdir()
                yield files
                _move(directory, stage)
            except BaseException:
                _clear(directory, stage)
                raise
            finally:
                shutil.rmtree(stage, ignore_errors=True)
    except BaseException as error:
        remove_folders(fresh)
        if isinstance(error, OSError):
            raise CheckpointError(f"{error.filename or directory}: {error.strerror or error}") from error
        raise


def make_folders(directory: Path) -> list[Path]:
    """Make a folder and those above it; returns those that were not there, the innermost first.

    Raises:
        CheckpointError: it cannot be made.
    """
    fresh = [folder for folder in (directory, *directory.parents) if not os.path.exists(folder)]
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        remove_folders(fresh)
        why = "it is a file" if isinstance(error, FileExistsError) else error.strerror
        raise CheckpointError(f"{directory} cannot be made a folder: {why}; name another one") from error
    return fresh


def remove_folders(fresh: list[Path]) -> None:
    """Remove folders that this process has made, the innermost first; one that holds something stays."""
    for folder in fresh:
        with contextlib.suppress(OSError):
            folder.rmdir()


@contextlib.contextmanager
def _locked(stage: Path) -> Iterator[None]:
    while True:
        with contextlib.suppress(FileExistsError):
            stage.mkdir()
        try:
            fd = os.open(stage / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:  # whoever was at work has just ended
            continue
        try:
            _lock(fd, stage)
            if _is_at(fd, stage / LOCK):
                yield
                return
        finally:
            os.close(fd)


def _lock(fd: int, stage: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise CheckpointError(
            f"{stage.parent}: another export is at work there; wait until it has ended, or name another folder"
        ) from error


def _is_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False


def _clear(directory: Path, stage: Path) -> bool:
    """Remove what was made, also what was moved already; false where there is nothing."""
    found = False
    with contextlib.suppress(FileNotFoundError, msgspec.DecodeError):
        for name in msgspec.json.decode((stage / MOVED).read_bytes(), type=list[str]):
            (directory / Path(name).name).unlink(missing_ok=True)
            found = True
        (stage / MOVED).unlink()
    for path in stage.iterdir():
        if path.name != LOCK:
            found = True
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return found


def _move(directory: Path, stage: Path) -> None:
    names = sorted(os.listdir(stage / FILES), key=lambda name: (name.endswith(LAST), name))
    for name in names:
        if (directory / name).exists():
            raise CheckpointError(f"{directory} holds {name} already; name an empty folder")
    write_atomic(stage / MOVED, msgspec.json.encode(names), durable=True)
    for name in names:
        os.rename(stage / FILES / name, directory / name)
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
    (stage / MOVED).unlink()  # from here on they stay
