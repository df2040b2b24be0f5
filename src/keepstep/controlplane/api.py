"""The HTTP side: for people, tools and scripts. Agents do not come this way.

Reads show the durable state only. Requests of people become facts like any other; their answer is sent once the fact
is in the log.
"""

from __future__ import annotations

import hmac
from typing import Literal

from msgspec import Struct
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from keepstep.controlplane import api_decide, api_sdc, desk, views
from keepstep.controlplane.desk import Desk, as_json, read_body
from keepstep.core.state import Job
from keepstep.model.facts import InjectRequested, StacksRequested, StopRequested
from keepstep.model.ids import NodeId, Rank
from keepstep.ports import Entry
from keepstep.store.exceptions import LogFull, StoreError

EVENTS_LIMIT = 1_000
"""Events per answer; also what ``limit`` is when not given."""
WAIT_LIMIT_S = 60.0
"""Longest long poll."""
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
        return as_json(view)

    async def jobs(self, request: Request) -> Response:
        return as_json(views.jobs_view(self._desk.mind))

    async def job(self, request: Request) -> Response:
        return as_json(views.job_view(self._desk.job(request), self._desk.mind.policy))

    async def incidents(self, request: Request) -> Response:
        return as_json(views.incidents_view([self._desk.job(request)]))

    async def all_incidents(self, request: Request) -> Response:
        return as_json(views.incidents_view(self._desk.mind.jobs()))

    async def incident(self, request: Request) -> Response:
        wanted = request.path_params["incident"]
        entries = await run_in_threadpool(views.incident_entries, self._desk.event_log, wanted)
        view = views.incident_view(self._desk.mind, entries, wanted)
        if view is None:
            raise HTTPException(404, f"there is no incident {wanted}; GET /v1/jobs/JOB/incidents lists them")
        return as_json(view)

    async def events(self, request: Request) -> Response:
        after = _number(request, "after", 0, 2**63 - 1)
        limit = int(_number(request, "limit", EVENTS_LIMIT, EVENTS_LIMIT))
        wait_s = _number(request, "wait", 0, WAIT_LIMIT_S)
        if self._desk.writer.seq <= after and wait_s:
            await self._desk.news.wait(lambda: self._desk.writer.seq > after, wait_s)
        entries: list[Entry] = await run_in_threadpool(
            lambda: list(self._desk.event_log.read(after=int(after), limit=limit))
        )
        return as_json(views.events_view(entries, after=int(after), last=self._desk.writer.seq))

    # ------------------------------------------------------------ requests

    async def stop(self, request: Request) -> Response:
        body = await read_body(request, StopBody)
        job = self._desk.job(request)
        if job.over:
            raise HTTPException(409, f"job {job.id} is over already: {job.state}")
        fact = StopRequested(job=job.id, at=self._desk.clock.now(), by=body.by, why=body.why)
        return as_json(views.accepted_view(await self._desk.ask(fact)), status=202)

    async def inject(self, request: Request) -> Response:
        body = await read_body(request, InjectBody)
        job = self._desk.job(request)
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
        return as_json(views.accepted_view(await self._desk.ask(fact)), status=202)

    async def ask_stacks(self, request: Request) -> Response:
        body = await read_body(request, StacksBody)
        job = self._desk.job(request)
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
        accepted = views.accepted_view(await self._desk.ask(fact))
        return as_json({**accepted, "request": number}, status=202)

    async def stacks(self, request: Request) -> Response:
        number = int(_number(request, "request", 0, 2**63 - 1))
        return as_json(views.stacks_view(self._desk.job(request), number))


def make_app(at: Desk) -> ASGIApp:
    api = Api(at)
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
            *api_decide.routes(at),
            *api_sdc.routes(at),
        ],
        exception_handlers={
            HTTPException: _on_http_error,
            LogFull: _on_log_full,
            StoreError: _on_store_error,
            TimeoutError: _on_timeout,
        },
    )
    return _Guard(app, at.token)


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


def _error(status: int, why: str) -> Response:
    return as_json({"schema": "keepstep.v1/Error", "error": why, "status": status}, status=status)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _error(error.status_code, error.detail)


async def _on_log_full(request: Request, error: Exception) -> Response:
    return _error(503, str(error))


async def _on_store_error(request: Request, error: Exception) -> Response:
    return _error(500, str(error))


async def _on_timeout(request: Request, error: Exception) -> Response:
    return _error(504, f"not in the log within {desk.ANSWER_S:g} s; it may still be carried out: look at /v1/events")
