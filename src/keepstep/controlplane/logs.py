"""The controller's own log: JSON lines on stderr (the launcher sends them to ``logs/controller.log``)."""

from __future__ import annotations

import contextlib
import sys
from typing import TextIO

import msgspec
import structlog


class _Forgiving:
    """A log that cannot be written (full disk, closed pipe) must not stop what it reports on."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError, ValueError):
            return self._stream.write(text)
        return 0

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()


def log_to_stderr() -> None:
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", key="ts"),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(serializer=_dumps),
        ],
        logger_factory=structlog.WriteLoggerFactory(file=_Forgiving(sys.stderr)),  # type: ignore[arg-type]
        cache_logger_on_first_use=True,
    )


def _dumps(event: object, **_: object) -> str:
    return msgspec.json.encode(event, enc_hook=repr, order="deterministic").decode()
