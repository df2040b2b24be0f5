"""The HTTP side: for people, tools and scripts. Agents do not come this way.

Reads show the durable state only. Requests of people become facts like any other; their answer is sent once the fact
is in the log.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec import Struct
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from keepstep.controlplane import views
from keepstep.controlplane.news import News
from keepstep.controlplane.writer import Writer
from keepstep.core.controller import Controller
from keepstep.core.state import Job
from keepstep.model.facts import InjectRequested, StacksRequested, StopRequested
from keepstep.model.ids import JobId, NodeId, Rank
from keepstep.ports import Clock, Entry, EventLog
from keepstep.store.exceptions import LogFull, StoreError

BODY_LIMIT = 64 * 1024
EVENTS_LIMIT = 1_000
"""Events per answer; also what ``limit`` is when not given."""
WAIT_LIMIT_S = 60.0
"""Longest long poll."""
ANSWER_S = 10.0
"""How long a person's request waits for its place in the log."""

Fault = Literal["kill", "freeze", "node-loss", "controller-loss", "store-loss", "exception", "slow"]


class StopBody(Struct, forbid_unknown_fields=True, kw_only=True):
    why: str = "asked to"
    by: str = "operator"


class InjectBody(Struct, forbid_unknown_fields=True, kw_only=True):
    fault: Fault
    rank: int | None = None
    node: str | None = None
    seconds: float = 0.0
    by: str = "operator"


class StacksBody(Struct, forbid_unknown_fields=True, kw_only=True):
    ranks: list[int] = []
    native: bool = False
    by: str = "operator"


class Desk(NamedTuple):
    """What the handlers work with."""

    writer: Writer[Controller]
    event_log: EventLog
    clock: Clock
    news: News
    connected: Callable[[], int]
    token: str = ""


class Api:
    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._requests = 0

    # ------------------------------------------------------------ reads

    async def status(self, request: Request) -> Response:
        writer = self._desk.writer
        view = views.status_view(writer.durable, seq=writer.seq)
        view["controller"] = {
            "agents_connected": self._desk.connected(),
            "log": "refusing" if writer.refusing else "ok",
            "why": writer.refusing or "",
            "facts_failed": writer.failed_facts,
        }
        return _json(view)

    async def jobs(self, request: Request) -> Response:
        return _json(views.jobs_view(self._mind))

    async def job(self, request: Request) -> Response:
        return _json(views.job_view(self._job(request)))

    async def incidents(self, request: Request) -> Response:
        return _json(views.incidents_view([self._job(request)]))

    async def all_incidents(self, request: Request) -> Response:
        return _json(views.incidents_view(self._mind.jobs()))

    async def incident(self, request: Request) -> Response:
        wanted = request.path_params["incident"]
        entries = await run_in_threadpool(views.incident_entries, self._desk.event_log, wanted)
        view = views.incident_view(self._mind, entries, wanted)
        if view is None:
            raise HTTPException(404, f"there is no incident {wanted}; GET /v1/jobs/JOB/incidents lists them")
        return _json(view)

    async def events(self, request: Request) -> Response:
        after = _number(request, "after", 0, 2**63 - 1)
        limit = int(_number(request, "limit", EVENTS_LIMIT, EVENTS_LIMIT))
        wait_s = _number(request, "wait", 0, WAIT_LIMIT_S)
        if self._desk.writer.seq <= after and wait_s:
            await self._desk.news.wait(lambda: self._desk.writer.seq > after, wait_s)
        entries: list[Entry] = await run_in_threadpool(
            lambda: list(self._desk.event_log.read(after=int(after), limit=limit))
        )
        return _json(views.events_view(entries, after=int(after), last=self._desk.writer.seq))

    # ------------------------------------------------------------ requests

    async def stop(self, request: Request) -> Response:
        body = await _body(request, StopBody)
        job = self._job(request)
        if job.over:
            raise HTTPException(409, f"job {job.id} is over already: {job.state}")
        fact = StopRequested(job=job.id, at=self._desk.clock.now(), by=body.by, why=body.why)
        return _json(views.accepted_view(await self._desk.writer.ask(fact, wait_s=ANSWER_S)), status=202)

    async def inject(self, request: Request) -> Response:
        body = await _body(request, InjectBody)
        job = self._job(request)
        if not job.spec.allow_inject:
            raise HTTPException(403, f"job {job.id} was not started with --allow-inject; nothing was done")
        if job.over:
            raise HTTPException(409, f"job {job.id} is over already: {job.state}")
        why_not = _objection(job, body)
        if why_not:
            raise HTTPException(422, why_not)
        self._requests += 1
        fact = InjectRequested(
            job=job.id,
            at=self._desk.clock.now(),
            fault=body.fault,
            by=body.by,
            rank=None if body.rank is None else Rank(body.rank),
            target=None if body.node is None else NodeId(body.node),
            seconds=body.seconds,
            number=self._desk.writer.seq + self._requests,
        )
        return _json(views.accepted_view(await self._desk.writer.ask(fact, wait_s=ANSWER_S)), status=202)

    async def ask_stacks(self, request: Request) -> Response:
        body = await _body(request, StacksBody)
        job = self._job(request)
        if job.over or job.roster is None:
            raise HTTPException(409, f"job {job.id} is {job.state}: it has no processes")
        if outside := [rank for rank in body.ranks if not 0 <= rank < job.roster.world_size]:
            raise HTTPException(422, f"there is no rank {outside[0]}; job {job.id} has {job.roster.world_size} ranks")
        self._requests += 1
        number = self._desk.writer.seq + self._requests
        fact = StacksRequested(
            job=job.id,
            at=self._desk.clock.now(),
            by=body.by,
            ranks=tuple(map(Rank, body.ranks)),
            native=body.native,
            number=number,
        )
        accepted = views.accepted_view(await self._desk.writer.ask(fact, wait_s=ANSWER_S))
        return _json({**accepted, "request": number}, status=202)

    async def stacks(self, request: Request) -> Response:
        number = int(_number(request, "request", 0, 2**63 - 1))
        return _json(views.stacks_view(self._job(request), number))

    # ------------------------------------------------------------ helpers

    @property
    def _mind(self) -> Controller:
        return self._desk.writer.durable

    def _job(self, request: Request) -> Job:
        name = request.path_params["job"]
        job = self._mind.job(JobId(name))
        if job is None:
            raise HTTPException(404, f"there is no job {name} here; GET /v1/jobs lists them")
        return job


def make_app(desk: Desk) -> ASGIApp:
    api = Api(desk)
    app = Starlette(
        routes=[
            Route("/v1/status", api.status),
            Route("/v1/jobs", api.jobs),
            Route("/v1/jobs/{job}", api.job),
            Route("/v1/jobs/{job}/incidents", api.incidents),
            Route("/v1/jobs/{job}/stop", api.stop, methods=["POST"]),
            Route("/v1/jobs/{job}/inject", api.inject, methods=["POST"]),
            Route("/v1/jobs/{job}/stacks", api.ask_stacks, methods=["POST"]),
            Route("/v1/jobs/{job}/stacks", api.stacks),
            Route("/v1/incidents", api.all_incidents),
            Route("/v1/incidents/{incident}", api.incident),
            Route("/v1/events", api.events),
        ],
        exception_handlers={
            HTTPException: _on_http_error,
            LogFull: _on_log_full,
            StoreError: _on_store_error,
            TimeoutError: _on_timeout,
        },
    )
    return _Guard(app, desk.token)


class _Guard:
    """Lets nobody in without the token, and no web page in at all (a browser would lend it the user's loopback)."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(dict(scope.get("headers", ()))) if scope["type"] == "http" else None
        if refusal is None:
            await self._app(scope, receive, send)
        else:
            await refusal(scope, receive, send)

    def _refusal(self, headers: dict[bytes, bytes]) -> Response | None:
        if b"origin" in headers:
            return _error(403, "requests from web pages are not served")
        if not self._token:
            return None
        kind, _, offered = headers.get(b"authorization", b"").partition(b" ")
        if kind.lower() == b"bearer" and hmac.compare_digest(offered.strip(), self._token):
            return None
        said = "wrong" if offered else "missing"
        response = _error(401, f"bearer token {said}; use the controller's token file (--token-file)")
        response.headers["www-authenticate"] = "Bearer"
        return response


def _objection(job: Job, body: InjectBody) -> str:
    """Why this fault cannot be aimed like this; empty when it can."""
    if body.rank is not None and not (job.roster and 0 <= body.rank < job.roster.world_size):
        size = job.roster.world_size if job.roster else 0
        return f"job {job.id} has no rank {body.rank}: its world has {size} ranks"
    if body.node is not None and NodeId(body.node) not in job.nodes:
        return f"job {job.id} has no node {body.node}; it has {', '.join(sorted(job.nodes)) or 'none'}"
    if not 0 <= body.seconds <= 3600:
        return f"seconds ({body.seconds}) must be between 0 and 3600"
    if body.fault in ("kill", "freeze", "exception", "slow") and body.rank is None:
        return f"{body.fault} needs a rank"
    if body.fault == "node-loss" and body.node is None and body.rank is None:
        return "node-loss needs a node, or a rank on it"
    return ""


async def _body(request: Request, kind: type[Any]) -> Any:
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > BODY_LIMIT:
            raise HTTPException(413, f"body above the limit of {BODY_LIMIT} bytes")
    try:
        return msgspec.json.decode(bytes(data) or b"{}", type=kind)
    except msgspec.DecodeError as error:
        raise HTTPException(422, f"body is not what {request.url.path} takes: {error}") from error


def _number(request: Request, name: str, default: float, ceiling: float) -> float:
    text = request.query_params.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not value >= 0:
        raise HTTPException(422, f"{name} ({text}) must be a number from 0 to {ceiling:g}")
    return min(value, ceiling)


def _json(view: object, *, status: int = 200) -> Response:
    return Response(msgspec.json.encode(view), status_code=status, media_type="application/json")


def _error(status: int, why: str) -> Response:
    return _json({"schema": "keepstep.v1/Error", "error": why, "status": status}, status=status)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _error(error.status_code, error.detail)


async def _on_log_full(request: Request, error: Exception) -> Response:
    return _error(503, str(error))


async def _on_store_error(request: Request, error: Exception) -> Response:
    return _error(500, str(error))


async def _on_timeout(request: Request, error: Exception) -> Response:
    return _error(504, f"not in the log within {ANSWER_S:g} s; it may still be carried out: look at /v1/events")
