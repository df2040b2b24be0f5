"""Fork server: a process that has imported torch once and turns copies of itself into programs.

Private to the shim, which speaks JSON lines with it over a socket pair. Each program is forked twice: the one in
between leaves at once, so the program's parent becomes the shim (a subreaper), which is light, imports nothing heavy
and collects everybody's exit status. If the shim ends, so does the zygote; its programs live on.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import signal
import socket
import sys
from types import ModuleType
from typing import Any

from keepstep.agent import become
from keepstep.checkpoint import title
from keepstep.model import env as names


def main() -> None:
    parser = argparse.ArgumentParser(prog="keepstep-zygote")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--warm", choices=("torch", "none"), required=True)
    options = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    channel = socket.socket(fileno=options.fd)
    os.set_inheritable(options.fd, False)
    warm = _warm_up(options.warm)
    request = _serve(channel)
    # From here on this is the child. The stack of the server is gone; what follows is the user's.
    become.prepare(env=request["env"], cwd=request["cwd"], out=request["out"], err=request["err"])
    _take_title(request)
    if warm is not None:
        warm.after_fork()
    del warm, channel, parser, options
    become.run(
        kind=request["kind"], target=request["target"], args=request["args"], error_file=request.get("error_file", "")
    )


def _take_title(request: dict[str, Any]) -> None:
    """Let ``ps`` tell the ranks of a node from one another, and from the fork server."""
    env, name = request["env"], request["id"]
    title.claim()
    job, program = env.get(names.JOB, "?"), request["target"]
    match env.get(names.ROLE):
        case "worker":
            title.show(f"rank {env['RANK']}", f"r{env['RANK']}", job=job, program=program)
        case "standby":
            title.show(f"standby {name}", name, job=job, program=program)
        case _:
            title.show(name, name, job=job)


def cuda_visible() -> bool:
    """Are there CUDA devices for this process? Asked without the driver, which must not be touched before a fork."""
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    return wanted not in ("", "-1") and os.path.exists("/dev/nvidiactl")


def _warm_up(kind: str) -> ModuleType | None:
    if kind == "none":
        return None
    gc.disable()  # what is imported stays: looking through it again and again would take a sixth of the time
    try:
        module = importlib.import_module("keepstep.agent.warm_torch")
        module.warm_up(train=not cuda_visible())
    except ImportError as error:
        print(f"note: programs start cold, the warm-up failed: {error}", file=sys.stderr, flush=True)
        return None
    finally:
        gc.enable()
    return module


def _serve(channel: socket.socket) -> dict[str, Any]:
    """Answer requests until the shim is gone; returns only in a child, with its request."""
    gc.collect()
    # What exists now is shared for ever: a collection in a child must not write into (and so copy) its pages.
    gc.freeze()
    buffer = b""
    _say(channel, {"ev": "warm"})
    while True:
        try:
            data = channel.recv(65536)
        except OSError:
            data = b""
        if not data:
            os._exit(0)
        buffer += data
        while b"\n" in buffer:
            line, buffer = buffer.split(b"\n", 1)
            request: dict[str, Any] = json.loads(line)
            try:
                pid = _fork_twice()
            except OSError as error:
                _say(channel, {"ev": "refused", "id": request["id"], "why": f"fork: {error.strerror}"})
                continue
            if pid == 0:
                # The descriptor is closed with all others; the object must not close whatever takes its number.
                channel.detach()
                return request
            _say(channel, {"ev": "spawned", "id": request["id"], "pid": pid})


def _fork_twice() -> int:
    """0 in the program, its pid in the zygote."""
    reader, writer = os.pipe()
    between = os.fork()
    if between == 0:
        try:
            pid = os.fork()
        except OSError:
            os._exit(1)
        if pid == 0:
            return 0
        os.write(writer, pid.to_bytes(8, "big"))
        os._exit(0)
    os.close(writer)
    try:
        answer = os.read(reader, 8)
    finally:
        os.close(reader)
        os.waitpid(between, 0)
    if len(answer) != 8:
        raise OSError(11, "no process could be made (memory or process limit)")
    return int.from_bytes(answer, "big")


def _say(channel: socket.socket, message: dict[str, Any]) -> None:
    try:
        channel.sendall(json.dumps(message).encode() + b"\n")
    except OSError:
        os._exit(0)


if __name__ == "__main__":
    main()
