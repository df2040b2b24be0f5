"""New interpreters for the shim: a program that is not forked, and the fork server itself.

The shim collects every exit with ``waitid``; so ``Popen`` is told that it has nothing to wait for.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from typing import Any


def start_program(request: dict[str, Any]) -> int:
    """Start the program of a request: a script, a module or any executable; its pid.

    Raises:
        OSError: it cannot be started.
    """
    kind, target = request["kind"], request["target"]
    interpreter = [request["env"].get("PYTHON_EXEC", sys.executable), "-u"]
    match kind:
        case "executable":
            command = [target]
        case "module":
            command = [*interpreter, "-m", target]
        case _:
            command = [*interpreter, target]
    with open(request["out"], "ab") as out, open(request["err"], "ab") as err:
        process = subprocess.Popen(
            [*command, *request["args"]],
            env=request["env"],
            cwd=request["cwd"],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
    process.returncode = 0
    return process.pid


def start_zygote(warm: str) -> tuple[int, socket.socket]:
    """Start a fork server; its pid, and our end of the socket pair to it."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "keepstep.agent.zygote", "--fd", str(theirs.fileno()), "--warm", warm]
    with theirs:
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
    process.returncode = 0
    return process.pid, ours
