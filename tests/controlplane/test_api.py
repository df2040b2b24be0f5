"""The HTTP side in process, over the real mind: every route, every refusal, and the same views offline."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from control_client import joined, spec

from keepstep.controlplane import desk as desk_module
from keepstep.controlplane import views
from keepstep.controlplane.api import make_app
from keepstep.controlplane.clock import AnchoredClock
from keepstep.controlplane.desk import Desk
from keepstep.controlplane.moments import when
from keepstep.controlplane.news import News
from keepstep.controlplane.writer import Writer
from keepstep.core.controller import Controller
from keepstep.model.actions import Join, StopJob, TakeStacks
from keepstep.model.facts import (
    ActionDone,
    AnyFact,
    JobSubmitted,
    RankAdvanced,
    RankResumed,
    SdkAttached,
    StacksTaken,
    StoreReady,
    WorkerExited,
)
from keepstep.model.ids import JobId, Nanos, NodeId, Rank, SlotId
from keepstep.model.records import Ordered
from keepstep.model.settings import Policy
from keepstep.model.stacks import ProcessStacks
from keepstep.ports import Entry
from keepstep.store.exceptions import LogFull
from keepstep.store.sqlite import SqliteLog, open_log


def as_json(view: object) -> Any:
    return msgspec.json.decode(msgspec.json.encode(view))


J, N = JobId("j"), NodeId("n0")


class Rig:
    def __init__(self, path: Path, token: str = "") -> None:
        self.log: SqliteLog = open_log(path)
        self.news = News()
        self.orders: list[Any] = []
        self.writer: Writer[Controller] = Writer(
            event_log=self.log,
            durable=Controller(Policy()),
            seq=0,
            load=lambda state: Controller.load(state, Policy()),
            clock=AnchoredClock(),
            publish=self._publish,
            wake=self.news.wake,
        )
        self.desk = Desk(self.writer, self.log, AnchoredClock(), self.news, lambda: 1, token)
        self.client = httpx.AsyncClient(
            transport=httpx.ASGITransport(app=make_app(self.desk)), base_url="http://controller"
        )
        self.seq = 0

    def _publish(self, entries: Any) -> None:
        self.orders += [entry.record.action for entry in entries if isinstance(entry.record, Ordered)]

    async def tell(self, fact: AnyFact) -> list[Entry]:
        return await self.writer.ask(fact, wait_s=5)

    def numbered(self) -> dict[str, Any]:
        self.seq += 1
        return {"job": J, "node": N, "at": Nanos(self.seq), "seq": self.seq}

    async def start_job(self, **changes: object) -> Join:
        """A job of one node and one rank, up to the order to start it."""
        await self.tell(JobSubmitted(job=J, at=Nanos(1), spec=spec("j", standbys=0, **changes)))
        self.seq += 1
        await self.tell(joined(self.seq))
        await self.tell(StoreReady(**self.numbered(), host="127.0.0.1", port=7))
        return next(action for action in self.orders if isinstance(action, Join))

    async def train(self, join: Join, step: int) -> None:
        """The rank attaches, resumes and commits a step in the join's epoch."""
        epoch = join.epoch
        slot = join.roster.members[0].slot
        await self.tell(ActionDone(**self.numbered(), action=join.id))
        await self.tell(SdkAttached(**self.numbered(), slot=slot, version=""))
        resumed = {"rank": Rank(0), "epoch": epoch, "newest": step, "source": "initial", "phases": {}}
        await self.tell(RankResumed(**self.numbered(), step=step, **resumed))
        await self.tell(RankAdvanced(**self.numbered(), rank=Rank(0), epoch=epoch, step=step + 1))

    async def die(self, join: Join) -> None:
        slot = join.roster.members[0].slot
        await self.tell(WorkerExited(**self.numbered(), slot=slot, rank=Rank(0), epoch=join.epoch, signal=9))


def run(tmp_path: Path, test: Callable[[Rig], Awaitable[None]], **options: Any) -> None:
    async def main() -> None:
        rig = Rig(tmp_path / "log.sqlite", **options)
        task = asyncio.create_task(rig.writer.run())
        try:
            async with asyncio.timeout(30):
                await test(rig)
        finally:
            await rig.client.aclose()
            rig.writer.close()
            await task
            rig.log.close()

    asyncio.run(main())


def test_a_job_from_submission_to_stop(tmp_path: Path) -> None:
    """Status, lists, detail and stop: schemas and values follow the job's life."""

    async def test(rig: Rig) -> None:
        assert (await rig.client.get("/v1/jobs")).json() == {"schema": "keepstep.v1/JobList", "jobs": []}
        join = await rig.start_job()
        (row,) = (await rig.client.get("/v1/jobs")).json()["jobs"]
        assert (row["job"], row["state"], row["world_size"], row["incidents_total"]) == ("j", "STARTING", 1, 0)
        await rig.train(join, 0)
        job = (await rig.client.get("/v1/jobs/j")).json()
        assert job["schema"] == "keepstep.v1/Job"
        assert (job["state"], job["level"], job["step"]) == ("RUNNING", 2, 1)
        assert [(n["node"], n["role"], n["ranks"], n["link"]) for n in job["nodes"]] == [("n0", "worker", "0", "up")]
        assert [(r["rank"], r["node"], r["advanced"]) for r in job["ranks"]] == [(0, "n0", True)]
        assert job["command"] == ["train.py"]
        answer = await rig.client.post("/v1/jobs/j/stop", json={"why": "enough", "by": "me"})
        assert answer.status_code == 202
        assert answer.json()["schema"] == "keepstep.v1/Accepted"
        assert answer.json()["events"][0]["record"]["fact"]["why"] == "enough"
        assert isinstance(rig.orders[-1], StopJob)
        status = (await rig.client.get("/v1/status")).json()
        assert status["jobs"][0]["state"] == "STOPPED"
        assert status["controller"] == {"agents_connected": 1, "log": "ok", "why": "", "facts_failed": 0}
        again = await rig.client.post("/v1/jobs/j/stop")
        assert again.status_code == 409

    run(tmp_path, test)


def test_an_incident_live_and_offline(tmp_path: Path) -> None:
    """A killed rank becomes an incident with evidence, plan and events; the log alone tells the very same."""

    async def test(rig: Rig) -> None:
        join = await rig.start_job()
        await rig.train(join, 4)
        await rig.die(join)
        (row,) = (await rig.client.get("/v1/jobs/j/incidents")).json()["incidents"]
        assert row["closed_at"] is None
        live = await rig.client.get(f"/v1/incidents/{row['id']}")
        assert live.status_code == 200
        view = live.json()
        assert view["schema"] == "keepstep.v1/Incident"
        assert view["ranks"] == "0"
        assert view["plans"]
        assert view["plans"][0]["reason"]
        assert view["suspects"]
        assert view["events"][0]["fact"] == "WorkerExited"
        assert "IncidentOpened" in [event["type"] for event in view["events"]]
        mind, entries = views.load_mind(tmp_path)
        assert as_json(views.incident_view(mind, entries, row["id"])) == view
        assert as_json(views.incidents_view(mind.jobs())) == (await rig.client.get("/v1/incidents")).json()
        job = mind.job(J)
        assert job is not None
        assert as_json(views.job_view(job)) == (await rig.client.get("/v1/jobs/j")).json()
        assert mind.dump() == rig.writer.durable.dump()
        assert views.incident_view(mind, entries, "j-i99") is None

    run(tmp_path, test)


def test_events_in_pages(tmp_path: Path) -> None:
    """``next`` leads through the whole log without gap or repetition."""

    async def test(rig: Rig) -> None:
        await rig.start_job()
        seen: list[int] = []
        after = 0
        while True:
            page = (await rig.client.get(f"/v1/events?after={after}&limit=3")).json()
            assert len(page["events"]) <= 3
            if not page["events"]:
                break
            seen += [event["seq"] for event in page["events"]]
            after = page["next"]
        assert seen == list(range(1, rig.writer.seq + 1))
        assert page["last"] == rig.writer.seq
        assert all(event["at"].endswith("Z") for event in (await rig.client.get("/v1/events")).json()["events"])

    run(tmp_path, test)


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "words"),
    [
        ("GET", "/v1/jobs/nope", None, 404, "no job nope here; GET /v1/jobs lists them"),
        ("GET", "/v1/incidents/j-i7", None, 404, "no incident j-i7"),
        ("GET", "/v1/nothing", None, 404, "Not Found"),
        ("POST", "/v1/status", {}, 405, "Method Not Allowed"),
        ("GET", "/v1/events?after=x", None, 422, "after (x) must be a number"),
        ("GET", "/v1/events?wait=-1", None, 422, "wait (-1) must be a number from 0 to 60"),
        ("GET", "/v1/events?limit=nan", None, 422, "limit (nan)"),
        ("POST", "/v1/jobs/j/stop", {"wyh": "x"}, 422, "unknown field `wyh`"),
        ("POST", "/v1/jobs/j/inject", {"fault": "melt"}, 422, "'melt'"),
        ("POST", "/v1/jobs/j/inject", {"fault": "kill"}, 422, "kill needs a rank"),
        ("POST", "/v1/jobs/j/inject", {"fault": "kill", "rank": 5}, 422, "no rank 5: its world has 1 ranks"),
        ("POST", "/v1/jobs/j/inject", {"fault": "kill", "rank": -1}, 422, "no rank -1"),
        ("POST", "/v1/jobs/j/inject", {"fault": "node-loss", "node": "x"}, 422, "no node x; it has n0"),
        ("POST", "/v1/jobs/j/inject", {"fault": "slow", "rank": 0, "seconds": 1e9}, 422, "between 0 and 3600"),
        ("POST", "/v1/jobs/j/stacks", {"ranks": [0, 7]}, 422, "no rank 7; job j has 1 ranks"),
        ("POST", "/v1/jobs/j/stacks", {"rank": 0}, 422, "unknown field `rank`"),
        ("GET", "/v1/jobs/j/stacks?request=x", None, 422, "request (x)"),
        ("POST", "/v1/jobs/j/stop", {"why": "x" * 70_000}, 413, "above the limit of 65536 bytes"),
    ],
)
def test_refusals(tmp_path: Path, method: str, path: str, body: object, status: int, words: str) -> None:
    """What cannot be done is answered with a sentence of the right status, and leaves no trace in the log."""

    async def test(rig: Rig) -> None:
        await rig.start_job(allow_inject=True)
        before = rig.writer.seq
        answer = await rig.client.request(method, path, json=body)
        assert answer.status_code == status
        assert answer.json()["schema"] == "keepstep.v1/Error"
        assert words in answer.json()["error"]
        assert rig.writer.seq == before

    run(tmp_path, test)


def test_injection_needs_leave(tmp_path: Path) -> None:
    """Without --allow-inject nothing is injected; with it the order goes to the rank's node, each with its own id."""

    async def test(rig: Rig) -> None:
        await rig.start_job(allow_inject=True)
        for _ in range(2):
            answer = await rig.client.post("/v1/jobs/j/inject", json={"fault": "kill", "rank": 0})
            assert answer.status_code == 202
        orders = [action for action in rig.orders if type(action).__name__ == "InjectFault"]
        assert [(order.fault, order.node, order.rank) for order in orders] == [("kill", "n0", 0)] * 2
        assert orders[0].id != orders[1].id

    async def without(rig: Rig) -> None:
        await rig.start_job()
        before = rig.writer.seq
        answer = await rig.client.post("/v1/jobs/j/inject", json={"fault": "kill", "rank": 0})
        assert answer.status_code == 403
        assert "was not started with --allow-inject" in answer.json()["error"]
        assert rig.writer.seq == before

    run(tmp_path, test)
    (tmp_path / "two").mkdir()
    run(tmp_path / "two", without)


def test_stacks_are_ordered_and_shown_with_who_is_still_missing(tmp_path: Path) -> None:
    """The answer to a request is what was shown for it; until a node has answered it is named."""

    async def test(rig: Rig) -> None:
        await rig.start_job()
        asked = (await rig.client.post("/v1/jobs/j/stacks", json={"ranks": [0], "by": "me"})).json()
        (order,) = [action for action in rig.orders if isinstance(action, TakeStacks)]
        assert (order.node, order.ranks, order.request) == ("n0", (0,), asked["request"])
        shown = (await rig.client.get(f"/v1/jobs/j/stacks?request={asked['request']}")).json()
        assert (shown["missing"], shown["processes"], shown["taken_at"]) == (["n0"], [], None)
        process = ProcessStacks(rank=Rank(0), slot=SlotId("s"), pid=9, role="trainer", name="python", state="S")
        await rig.tell(StacksTaken(**rig.numbered(), epoch=order.epoch, request=order.request, processes=(process,)))
        shown = (await rig.client.get(f"/v1/jobs/j/stacks?request={asked['request']}")).json()
        assert shown["missing"] == []
        assert [one["pid"] for one in shown["processes"]] == [9]
        later = (await rig.client.get(f"/v1/jobs/j/stacks?request={asked['request'] + 1}")).json()
        assert later["processes"] == []

    run(tmp_path, test)


def test_the_token_is_asked_for_everywhere(tmp_path: Path) -> None:
    """No route, not even one that does not exist, answers without the token."""

    async def test(rig: Rig) -> None:
        for path in ("/v1/status", "/v1/events", "/v1/nothing"):
            for headers in ({}, {"Authorization": "Bearer nope"}, {"Authorization": "Basic s3cret"}):
                answer = await rig.client.get(path, headers=headers)
                assert answer.status_code == 401
                assert answer.headers["www-authenticate"] == "Bearer"
        assert (await rig.client.post("/v1/jobs/j/stop")).status_code == 401
        answer = await rig.client.get("/v1/status", headers={"Authorization": "Bearer s3cret"})
        assert answer.status_code == 200

    run(tmp_path, test, token="s3cret")


def test_web_pages_are_kept_out(tmp_path: Path) -> None:
    """A page in the user's browser can reach loopback; what a browser marks with its origin is not served."""

    async def test(rig: Rig) -> None:
        await rig.start_job()
        answer = await rig.client.post("/v1/jobs/j/stop", headers={"Origin": "https://example.com"})
        assert answer.status_code == 403
        job = rig.writer.durable.job(J)
        assert job is not None
        assert not job.over

    run(tmp_path, test)


def test_a_request_that_is_not_durable_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No false promise: a request that did not reach the log in time is answered with 504, a refused one with 503."""
    monkeypatch.setattr(desk_module, "ANSWER_S", 0.05)

    async def test(rig: Rig) -> None:
        await rig.start_job()
        append = rig.log.append

        def full(*args: Any, **kwargs: Any) -> int:
            raise LogFull("no space, 0 bytes left on the file system of /x")

        monkeypatch.setattr(rig.log, "append", full)
        assert (await rig.client.post("/v1/jobs/j/stop")).status_code == 504
        answer = await rig.client.post("/v1/jobs/j/stop")
        assert answer.status_code == 503
        assert "0 bytes left" in answer.json()["error"]
        status = (await rig.client.get("/v1/status")).json()["controller"]
        assert status["log"] == "refusing"
        monkeypatch.setattr(rig.log, "append", append)

    run(tmp_path, test)


def test_times_are_utc_and_exact() -> None:
    """Nanoseconds become RFC 3339 without floating-point error; an unknown time is null."""
    assert when(Nanos(1_700_000_000_123_456_789)) == "2023-11-14T22:13:20.123456Z"
    assert when(Nanos(0)) is None
