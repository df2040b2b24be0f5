"""Become the user's program: what a freshly forked process does so that nothing tells it from ``python script``.

The caller has unwound its own stack before; what ends here ends the way the interpreter ends by itself, so that
threads are joined, ``atexit`` runs and streams are flushed.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import io
import json
import os
import runpy
import signal
import sys
import types
from typing import Any, NoReturn

from keepstep.agent import stackdump
from keepstep.model.env import NODE_DIR

MESSAGE_BYTES = 2000
TRACEBACK_LINES = 30

_PEER_TROUBLE = ("DistBackendError", "DistNetworkError", "DistStoreError")
_PEER_WORDS = (
    "gloo/transport",
    "Connection closed by peer",
    "Connection reset by peer",
    "NCCL communicator was aborted",
)


def prepare(*, env: dict[str, str], cwd: str, out: str, err: str) -> None:
    """New session, default signals, own streams, own environment; no descriptor of the parent's stays open."""
    os.setsid()
    _reset_signals()
    _redirect(out, err)
    os.chdir(cwd)
    _replace_environment(env)
    if node_dir := env.get(NODE_DIR):
        stackdump.answer(node_dir)


def run(*, kind: str, target: str, args: list[str], error_file: str = "") -> NoReturn:
    """Run the program as ``__main__`` and end the process with the code Python would end it with."""
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main
    sys.argv = [target, *args]
    try:
        if kind == "module":
            _set_path0(os.getcwd())
            sys.argv[0] = "-m"
            runpy._run_module_as_main(target)  # type: ignore[attr-defined]
        elif kind == "run_path" or not os.path.isfile(target) or _is_archive(target):
            runpy.run_path(target, run_name="__main__")
        else:
            _run_script(main, target)
    except SystemExit:
        raise
    except KeyboardInterrupt as error:
        _report(error)
        _flush()
        # As the interpreter does: the parent shall see a death by SIGINT, not an exit code.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException as error:
        _write_error(error, error_file)
        _report(error)
        sys.exit(1)
    sys.exit(0)


def _run_script(main: types.ModuleType, target: str) -> None:
    path = os.path.abspath(target)
    _set_path0(os.path.dirname(os.path.realpath(target)))
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    main.__dict__.update(
        __file__=path,
        __cached__=None,
        __loader__=importlib.machinery.SourceFileLoader("__main__", path),
        __package__=None,
        __spec__=None,
    )
    exec(code, main.__dict__)


def _is_archive(target: str) -> bool:
    with open(target, "rb") as file:
        return file.read(4) == b"PK\x03\x04"


def _set_path0(folder: str) -> None:
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0:1] = [folder]


def _reset_signals() -> None:
    for number in signal.valid_signals():
        if number in (signal.SIGKILL, signal.SIGSTOP):
            continue
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_DFL)
    # What a fresh interpreter sets up (Python/pylifecycle.c).
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.set_wakeup_fd(-1)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _redirect(out: str, err: str) -> None:
    append = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    for number, (path, flags) in enumerate(((os.devnull, os.O_RDONLY), (out, append), (err, append))):
        fd = os.open(path, flags, 0o644)
        os.dup2(fd, number, inheritable=True)
        if fd > 2:
            os.close(fd)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2:
            with contextlib.suppress(OSError):
                os.close(int(name))
    encoding = "utf-8"
    # Unbuffered, as torchrun starts its workers with -u. The originals too: libraries restore them.
    streams = {
        "stdin": open(0, encoding=encoding, closefd=False),  # noqa: SIM115
        "stdout": _writer(1, "strict", encoding),
        "stderr": _writer(2, "backslashreplace", encoding),
    }
    for name, stream in streams.items():
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _writer(fd: int, errors: str, encoding: str) -> io.TextIOWrapper:
    raw = open(fd, "wb", buffering=0, closefd=False)  # noqa: SIM115
    return io.TextIOWrapper(raw, encoding=encoding, errors=errors, write_through=True)


def _replace_environment(env: dict[str, str]) -> None:
    for name in list(os.environ):
        if name not in env:
            del os.environ[name]
    os.environ.update(env)
    # The interpreter read PYTHONPATH long ago; entries that are new for this program are added by hand.
    wanted = (os.path.abspath(p) for p in env.get("PYTHONPATH", "").split(os.pathsep) if p)
    sys.path[1:1] = [p for p in wanted if p not in sys.path]


def _user_traceback(error: BaseException) -> types.TracebackType | None:
    """Leave out our own frames and runpy's, so that the user reads only his own code."""
    ours = (__file__, runpy.__file__, "<frozen runpy>")
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None and frame.tb_frame.f_code.co_filename in ours:
        frame = frame.tb_next
    return frame


def _report(error: BaseException) -> None:
    shown = None if isinstance(error, SyntaxError) and _all_ours(error) else _user_traceback(error)
    with contextlib.suppress(Exception):
        sys.excepthook(type(error), error.with_traceback(shown), shown)


def _all_ours(error: BaseException) -> bool:
    last = _user_traceback(error)
    return last is not None and last.tb_frame.f_code.co_filename == __file__


def _write_error(error: BaseException, path: str) -> None:
    """Leave the exception as plain data for the agent; nobody depends on it, so a failure is silent."""
    if not path:
        return
    with contextlib.suppress(Exception):
        data = describe(error)
        temporary = f"{path}.new"
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(data, file)
        os.replace(temporary, path)


def describe(error: BaseException) -> dict[str, Any]:
    """An exception as the fields of ``model.facts.UserError``."""
    import traceback

    frames = traceback.extract_tb(_user_traceback(error))
    last = frames[-1] if frames else None
    message = str(error)[:MESSAGE_BYTES]
    name = type(error).__name__
    # Without the SDK nobody tells us that a collective broke first; the names that torch uses for it do.
    consequence = name in _PEER_TROUBLE or (name == "RuntimeError" and any(w in message for w in _PEER_WORDS))
    lines = traceback.format_exception(type(error), error, _user_traceback(error))
    text = [line for chunk in lines for line in chunk.rstrip("\n").split("\n")]
    return {
        "type": name,
        "message": message,
        "file": last.filename if last else "",
        "line": (last.lineno or 0) if last else 0,
        "function": last.name if last else "",
        "traceback": text[-TRACEBACK_LINES:],
        "consequence": consequence,
    }


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
