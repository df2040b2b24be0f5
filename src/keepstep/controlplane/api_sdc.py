"""Investigations over HTTP: list them, open one, move it, close it. A conflict is told before anything is written."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from keepstep.controlplane import views
from keepstep.controlplane.desk import Desk, as_json, read_body
from keepstep.controlplane.sdc_views import investigations_view
from keepstep.core.locate.sdc_people import refusal
from keepstep.core.summary_lines import record_words
from keepstep.model.facts import OperatorSaid, Verb
from keepstep.model.ids import Rank


class OpenBody(Struct, forbid_unknown_fields=True, kw_only=True):
    ranks: list[int]
    why: str
    by: str = "operator"


class StepBody(Struct, forbid_unknown_fields=True, kw_only=True):
    state: str
    why: str
    by: str = "operator"


class CloseBody(Struct, forbid_unknown_fields=True, kw_only=True):
    verdict: Literal["confirmed", "cleared"]
    why: str = "by a person"
    by: str = "operator"


def routes(desk: Desk) -> list[BaseRoute]:
    """All routes of investigations."""

    async def listed(request: Request) -> Response:
        return as_json(investigations_view([desk.job(request)]))

    async def opened(request: Request) -> Response:
        body: OpenBody = await read_body(request, OpenBody)
        return await said(request, "sdc-open", body.by, body.why, ranks=tuple(map(Rank, body.ranks)))

    async def stepped(request: Request) -> Response:
        body: StepBody = await read_body(request, StepBody)
        return await said(request, "sdc-step", body.by, body.why, other=body.state)

    async def closed(request: Request) -> Response:
        body: CloseBody = await read_body(request, CloseBody)
        return await said(request, "sdc-close", body.by, body.why, other=body.verdict)

    async def said(
        request: Request, verb: Verb, by: str, why: str, *, other: str = "", ranks: tuple[Rank, ...] = ()
    ) -> Response:
        job = desk.job(request)
        fact = OperatorSaid(
            job=job.id,
            at=desk.clock.now(),
            verb=verb,
            by=by,
            subject=request.path_params.get("investigation", ""),
            other=other,
            ranks=ranks,
            why=why,
        )
        if against := refusal(job, fact):
            raise HTTPException(409, against)
        entries = await desk.ask(fact)
        answer = [words for entry in entries[1:] if (words := record_words(entry.record))]
        return as_json({**views.accepted_view(entries), "answer": answer}, status=202)

    return [
        Route("/v1/jobs/{job}/sdc", listed),
        Route("/v1/jobs/{job}/sdc", opened, methods=["POST"]),
        Route("/v1/jobs/{job}/sdc/{investigation}/step", stepped, methods=["POST"]),
        Route("/v1/jobs/{job}/sdc/{investigation}/close", closed, methods=["POST"]),
    ]
