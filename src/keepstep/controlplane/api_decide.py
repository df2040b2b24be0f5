"""What people decide over HTTP: one route per verb, each answered with what the log made of it.

A conflict is told before anything is written (409, with the way out); saying again what is so already is answered with
200 and adds nothing to the log.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

from msgspec import Struct
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from keepstep.controlplane import views
from keepstep.controlplane.decide_views import proposals_view
from keepstep.controlplane.desk import Desk, as_json, read_body
from keepstep.core.decide.operator import already, refusal
from keepstep.core.summary_lines import record_words
from keepstep.model.facts import OperatorSaid, Verb

VERBS: tuple[Verb, ...] = tuple(verb for verb in get_args(Verb) if not verb.startswith("sdc-"))


class SayBody(Struct, forbid_unknown_fields=True, kw_only=True):
    """Attributes:
    subject: proposal, incident or node; empty for what is about the whole job.
    other: the incident to merge into; the mode.
    """

    subject: str = ""
    other: str = ""
    why: str = ""
    by: str = "operator"


def routes(desk: Desk) -> list[BaseRoute]:
    """All routes of people's decisions."""

    async def of_job(request: Request) -> Response:
        return as_json(proposals_view([desk.job(request)]))

    async def of_all(request: Request) -> Response:
        return as_json(proposals_view(desk.mind.jobs()))

    said = [Route(f"/v1/jobs/{{job}}/{verb}", _handler(desk, verb), methods=["POST"]) for verb in VERBS]
    return [Route("/v1/jobs/{job}/proposals", of_job), Route("/v1/proposals", of_all), *said]


def _handler(desk: Desk, verb: Verb) -> Callable[[Request], Any]:
    async def handle(request: Request) -> Response:
        body: SayBody = await read_body(request, SayBody)
        job = desk.job(request)
        fact = OperatorSaid(
            job=job.id,
            at=desk.clock.now(),
            verb=verb,
            by=body.by,
            subject=body.subject,
            other=body.other,
            why=body.why,
        )
        if why := refusal(job, fact):
            raise HTTPException(409, why)
        if why := already(job, fact):
            return as_json({**views.accepted_view([]), "answer": [why], "already": True})
        entries = await desk.ask(fact)
        answer = [words for entry in entries[1:] if (words := record_words(entry.record))]
        return as_json({**views.accepted_view(entries), "answer": answer, "already": False}, status=202)

    return handle
