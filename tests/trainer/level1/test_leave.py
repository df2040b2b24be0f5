"""A script that just ends leaves no group behind for the interpreter's last moments."""

from __future__ import annotations

import os
import subprocess
import sys

SCRIPT = """
import atexit
from torch import distributed as dist
atexit.register(lambda: print("groups left:", dist.is_initialized()))  # runs last: the first to be registered
import keepstep
keepstep.init()
print("groups:", dist.is_initialized())
"""


def test_groups_end_before_the_interpreter_does() -> None:
    """They are there until the script's last line, and gone before anything is torn down."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("KEEPSTEP_", "TORCHELASTIC_"))}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        environ.pop(name, None)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environ, capture_output=True, text=True, timeout=90, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["groups: True", "groups left: False"]
