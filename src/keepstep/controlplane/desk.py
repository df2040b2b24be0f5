"""The desk: what the HTTP handlers work with, and how they read a request and answer it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from keepstep.controlplane.news import News
from keepstep.controlplane.writer import Writer
from keepstep.core.controller import Controller
from keepstep.core.state import Job
from keepstep.model.facts import AnyFact
from keepstep.model.ids import JobId
from keepstep.ports import Clock, Entry, EventLog

BODY_LIMIT = 64 * 1024
ANSWER_S = 10.0
"""How long a person's request waits for its place in the log."""


class Desk(NamedTuple):
    """What the handlers work with."""

    writer: Writer[Controller]
    event_log: EventLog
    clock: Clock
    news: News
    connected: Callable[[], int]
    token: str = ""

    @property
    def mind(self) -> Controller:
        """The durable state."""
        return self.writer.durable

    def job(self, request: Request) -> Job:
        """The job that the path names.

        Raises:
            HTTPException: 404, there is none.
        """
        name = request.path_params["job"]
        job = self.mind.job(JobId(name))
        if job is None:
            raise HTTPException(404, f"there is no job {name} here; GET /v1/jobs lists them")
        return job

    async def ask(self, fact: AnyFact) -> list[Entry]:
        """Have it decided; what it led to is durable then.

        Raises:
            TimeoutError, LogFull: as ``Writer.ask``.
        """
        return await self.writer.ask(fact, wait_s=ANSWER_S)


async def read_body(request: Request, kind: type[Any]) -> Any:
    """The request's JSON as a value of ``kind``; an empty body is one of defaults.

    Raises:
        HTTPException: 413 too long, 422 not of this kind.
    """
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > BODY_LIMIT:
            raise HTTPException(413, f"body above the limit of {BODY_LIMIT} bytes")
    try:
        return msgspec.json.decode(bytes(data) or b"{}", type=kind)
    except msgspec.DecodeError as error:
        raise HTTPException(422, f"body is not what {request.url.path} takes: {error}") from error


def as_json(view: object, *, status: int = 200) -> Response:
    return Response(msgspec.json.encode(view), status_code=status, media_type="application/json")
