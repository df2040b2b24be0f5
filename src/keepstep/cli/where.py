"""Which controller or run a command is about."""

from __future__ import annotations

from typing import NamedTuple


class Where(NamedTuple):
    """All of it may be left out: then it is the latest run of this machine."""

    server: str = ""
    token_file: str = ""
    state_dir: str = ""
