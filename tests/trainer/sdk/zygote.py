"""A warm parent for test workers: imports torch once, then forks. Keeps the suite fast; the product has its own shim.

Talks lines of JSON on stdin and stdout: ``{"env": ..., "out": ..., "err": ..., "script": ...}`` answers
``{"pid": n}``; a child's end is told as ``{"pid": n, "status": m}``.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import threading
import traceback
from typing import Any


def serve() -> None:
    gc.disable()  # nothing of what is imported goes again
    import torch
    import torch.distributed.fsdp
    import torch.nn.parallel
    from torch.distributed import device_mesh  # noqa: F401

    import keepstep.trainer.loop_torch
    import keepstep.trainer.session_torch  # noqa: F401

    torch.set_num_threads(1)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    gc.enable()
    gc.freeze()
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    pending = b""
    while True:
        ready, _, _ = select.select([0, read], [], [])
        if read in ready:
            os.read(read, 4096)
            while True:
                try:
                    pid, status = os.waitpid(-1, os.WNOHANG)
                except ChildProcessError:
                    break
                if not pid:
                    break
                tell({"pid": pid, "status": os.waitstatus_to_exitcode(status)})
        if 0 in ready:
            data = os.read(0, 65536)
            if not data:
                os._exit(0)
            pending += data
            while b"\n" in pending:
                line, pending = pending.split(b"\n", 1)
                spawn(json.loads(line))


def spawn(order: dict[str, Any]) -> None:
    pid = os.fork()
    if pid:
        tell({"pid": pid})
        return
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
        os.dup2(os.open(order["out"], os.O_WRONLY | os.O_CREAT), 1)
        os.dup2(os.open(order["err"], os.O_WRONLY | os.O_CREAT), 2)
        os.environ.clear()
        os.environ.update(order["env"])
        sys.argv = [order["script"]]
        runpy.run_path(order["script"], run_name="__main__")
        code = 0
    except SystemExit as leave:
        code = leave.code if isinstance(leave.code, int) else (1 if leave.code else 0)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def tell(words: dict[str, Any]) -> None:
    os.write(1, json.dumps(words).encode() + b"\n")


class Child:
    """Looks like the little of ``Popen`` that the tests use."""

    def __init__(self, zygote: Zygote, pid: int) -> None:
        self.pid, self._zygote = pid, zygote

    def poll(self) -> int | None:
        return self._zygote.ended.get(self.pid)

    def wait(self, limit_s: float = 30.0) -> int:
        with self._zygote.news:
            if not self._zygote.news.wait_for(lambda: self.pid in self._zygote.ended, limit_s):
                raise TimeoutError(f"process {self.pid} still runs after {limit_s} s")
            return self._zygote.ended[self.pid]

    def send(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended, and that is not heard of yet
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send(signal.SIGKILL)


class Zygote:
    """One warm parent per test session."""

    def __init__(self) -> None:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("KEEPSTEP_")}
        self._process = subprocess.Popen(
            [sys.executable, "-u", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment | {"OMP_NUM_THREADS": "1"},
        )
        self.news = threading.Condition()
        self.ended: dict[int, int] = {}
        self._born: list[int] = []
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            words = json.loads(line)
            with self.news:
                if "status" in words:
                    self.ended[words["pid"]] = words["status"]
                else:
                    self._born.append(words["pid"])
                self.news.notify_all()

    def spawn(self, script: str, env: dict[str, str], out: str, err: str) -> Child:
        assert self._process.stdin is not None
        order = {"script": script, "env": env, "out": out, "err": err}
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()
        with self.news:
            if not self.news.wait_for(lambda: bool(self._born), 90):
                raise TimeoutError("the warm parent does not fork")
            return Child(self, self._born.pop(0))

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)  # it may still be importing torch, on a busy machine


if __name__ == "__main__":
    serve()
