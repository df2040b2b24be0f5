"""``keepstep token new FILE``: the secret that agents, controller and commands share beyond loopback."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from keepstep.cli.errors import DoorError, PreflightError

TOKEN_BYTES = 32


def new(path: Path) -> None:
    """Write a new token, readable by its owner only.

    Raises:
        DoorError: the file exists (a token in use is never overwritten) or cannot be written.
    """
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError as error:
        raise PreflightError(
            f"{path} exists and is not overwritten: jobs that use it would be locked out",
            help="choose another name, or remove it yourself once no job uses it",
        ) from error
    except OSError as error:
        raise DoorError(f"{path} cannot be written: {error.strerror}", help="choose a directory of yours") from error
    with os.fdopen(fd, "w") as file:
        file.write(secrets.token_urlsafe(TOKEN_BYTES) + "\n")
        file.flush()
        os.fsync(file.fileno())
