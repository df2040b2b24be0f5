"""Where answers come from: the controller's API while it is up, else the log that it left behind.

Both give the same values (``controlplane.views``), so every command works during, after and without the job;
it only says on stderr when what it shows is read from disk.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from keepstep.cli import dirs
from keepstep.cli.client import Api
from keepstep.cli.errors import ConfigError, DoorError, NotFound, Unreachable, closest
from keepstep.cli.plan import parse_endpoint
from keepstep.cli.say import say
from keepstep.cli.where import Where
from keepstep.controlplane.address import read_address
from keepstep.store.exceptions import StoreError

SERVER = "KEEPSTEP_CONTROLLER_URL"
TOKEN_FILE = "KEEPSTEP_TOKEN_FILE"
FIRST_ANSWER_S = 3.0
"""How long a controller that should be there may take to answer before its log is read instead."""
PAGE = 1000


class Source(Protocol):
    """The same questions to a controller and to a log."""

    live: bool
    run_dir: Path | None

    def status(self) -> dict[str, Any]: ...
    def jobs(self) -> dict[str, Any]: ...
    def job(self, job: str) -> dict[str, Any]: ...
    def incidents(self, job: str) -> dict[str, Any]: ...
    def incident(self, incident: str) -> dict[str, Any]: ...
    def stacks(self, job: str, request: int) -> dict[str, Any]: ...
    def events(self, after: int = 0, wait_s: float = 0.0) -> Iterator[dict[str, Any]]: ...
    def proposals(self, job: str) -> dict[str, Any]: ...
    def investigations(self, job: str) -> dict[str, Any]: ...
    def post(self, *path: str, body: dict[str, Any]) -> dict[str, Any]: ...


class Live:
    """A controller that answers."""

    live = True

    def __init__(self, api: Api, run_dir: Path | None) -> None:
        self.api, self.run_dir = api, run_dir

    def status(self) -> dict[str, Any]:
        return self.api.get("status")

    def jobs(self) -> dict[str, Any]:
        return self.api.get("jobs")

    def job(self, job: str) -> dict[str, Any]:
        return self.api.get("jobs", job)

    def incidents(self, job: str) -> dict[str, Any]:
        return self.api.get("jobs", job, "incidents")

    def incident(self, incident: str) -> dict[str, Any]:
        return self.api.get("incidents", incident)

    def stacks(self, job: str, request: int) -> dict[str, Any]:
        return self.api.get("jobs", job, "stacks", request=request)

    def events(self, after: int = 0, wait_s: float = 0.0) -> Iterator[dict[str, Any]]:
        while True:
            page = self.api.get("events", after=after, limit=PAGE, wait=wait_s or None, timeout_s=wait_s + 10.0)
            found = page.get("events", [])
            yield from found
            if len(found) < PAGE:
                return
            after = int(found[-1]["seq"])

    def proposals(self, job: str) -> dict[str, Any]:
        return self.api.get("jobs", job, "proposals")

    def investigations(self, job: str) -> dict[str, Any]:
        return self.api.get("jobs", job, "sdc")

    def post(self, *path: str, body: dict[str, Any]) -> dict[str, Any]:
        return self.api.post(*path, body=body)


class Offline:
    """The log of a run whose controller does not answer."""

    live = False

    def __init__(self, run_dir: Path) -> None:
        from keepstep.controlplane import views

        self.run_dir: Path | None = run_dir
        self._views = views
        try:
            self._mind, self._entries = views.load_mind(run_dir)
        except (OSError, StoreError) as error:
            raise NotFound(
                f"the log of {run_dir.name} cannot be read: {error}", help="`keepstep jobs` lists all runs"
            ) from error

    def status(self) -> dict[str, Any]:
        return _plain(self._views.status_view(self._mind, seq=len(self._entries)))

    def jobs(self) -> dict[str, Any]:
        return _plain(self._views.jobs_view(self._mind))

    def job(self, job: str) -> dict[str, Any]:
        found = next((one for one in self._mind.jobs() if one.id == job), None)
        if found is None:
            raise NotFound(f"the log of {self.run_dir} holds no job {job}", help="`keepstep jobs` lists all runs")
        return _plain(self._views.job_view(found, self._mind.policy))

    def incidents(self, job: str) -> dict[str, Any]:
        return _plain(self._views.incidents_view([one for one in self._mind.jobs() if one.id == job]))

    def incident(self, incident: str) -> dict[str, Any]:
        view = self._views.incident_view(self._mind, self._entries, incident)
        if view is None:
            raise NotFound(f"there is no incident {incident}", help="`keepstep incidents` lists them")
        return _plain(view)

    def stacks(self, job: str, request: int) -> dict[str, Any]:
        found = next((one for one in self._mind.jobs() if one.id == job), None)
        if found is None:
            raise NotFound(f"the log of {self.run_dir} holds no job {job}", help="`keepstep jobs` lists all runs")
        return _plain(self._views.stacks_view(found, request))

    def events(self, after: int = 0, wait_s: float = 0.0) -> Iterator[dict[str, Any]]:
        view = _plain(self._views.events_view(self._entries[after:], after=after, last=len(self._entries)))
        yield from view["events"]

    def proposals(self, job: str) -> dict[str, Any]:
        from keepstep.controlplane.decide_views import proposals_view

        return _plain(proposals_view([one for one in self._mind.jobs() if one.id == job]))

    def investigations(self, job: str) -> dict[str, Any]:
        from keepstep.controlplane.sdc_views import investigations_view

        return _plain(investigations_view([one for one in self._mind.jobs() if one.id == job]))

    def post(self, *path: str, body: dict[str, Any]) -> dict[str, Any]:
        raise Unreachable(
            "the controller of this run does not answer: nothing can be ordered",
            help="signal the launchers themselves (SIGTERM), or wait until the controller is back",
        )


def find(where: Where, job: str = "", environ: Mapping[str, str] | None = None) -> Source:
    """``--server``, $KEEPSTEP_CONTROLLER_URL, else the run of the job's name, else the latest run.

    Raises:
        NotFound: there is no run of this name, or none at all.
        Unreachable: a controller was named and does not answer.
    """
    environ = os.environ if environ is None else environ
    token_file = where.token_file or environ.get(TOKEN_FILE, "")
    server = where.server or environ.get(SERVER, "")
    if server:
        endpoint = parse_endpoint(server.removeprefix("http://").rstrip("/"), 0, "--server")
        api = Api(endpoint.host, endpoint.port, token_file=token_file)
        api.get("status", timeout_s=FIRST_ANSWER_S)
        return Live(api, None)
    return of_run(find_run(dirs.state_dir(where.state_dir or None, environ), job), token_file)


def of_run(run_dir: Path, token_file: str = "", *, quiet: bool = False) -> Source:
    """The controller of a run, or its log."""
    address = read_address(run_dir)
    if address is not None:
        api = Api(address.host, address.http_port, token_file=token_file or address.token_file)
        try:
            api.get("status", timeout_s=FIRST_ANSWER_S)
            return Live(api, run_dir)
        except Unreachable:
            pass  # nobody, or by now somebody else at this port
        except ConfigError:  # a copied run directory: its controller's token is not here, and neither is the controller
            if token_file:
                raise
    elif not (run_dir / "log.sqlite").exists():
        raise _elsewhere(run_dir)
    if not quiet and not (run_dir / "exit.json").exists():
        say(f"no controller answers for {run_dir.name}: this is what its log says")
    return Offline(run_dir)


def find_run(state: Path, job: str = "") -> Path:
    """The run directory of a job (or of the latest run); an unambiguous beginning of the name is enough."""
    runs = dirs.all_runs(state)
    if not runs:
        raise NotFound(f"there are no runs in {dirs.runs(state)}", help="start one: keepstep run train.py")
    if not job or job == dirs.LATEST:
        latest = dirs.runs(state) / dirs.LATEST
        return latest.resolve() if latest.exists() else runs[0]
    found = [run for run in runs if run.name == job] or [run for run in runs if run.name.startswith(job)]
    if len(found) == 1:
        return found[0]
    names = [run.name for run in runs]
    if found:
        raise NotFound(f"{job} may be any of {', '.join(run.name for run in found)}", help="give more of the name")
    near = closest(job, names)
    raise NotFound(f"there is no run {job}", help=f"did you mean {near}?" if near else "`keepstep jobs` lists all runs")


def _elsewhere(run_dir: Path) -> DoorError:
    """The run of a node that does not host the controller."""
    host = next((str(c["controller_host"]) for c in node_configs(run_dir)), "")
    at = f" runs on {host}" if host else " is not on this machine"
    return NotFound(
        f"the controller and the log of {run_dir.name} are not here: the controller{at}",
        help="ask there, or give --server HOST:PORT (its HTTP port is in controller.json there)",
    )


def node_configs(run_dir: Path) -> list[dict[str, Any]]:
    """What the launchers on this machine told their agents."""
    import json

    found = []
    for path in sorted((run_dir / dirs.NODES).glob("*.json")):
        try:
            config = json.loads(path.read_bytes())
        except (OSError, ValueError):
            continue
        if isinstance(config, dict) and "node_dir" in config:
            found.append(config)
    return found


def _plain(view: Any) -> dict[str, Any]:
    """As it would have come over HTTP."""
    import msgspec

    plain = msgspec.to_builtins(view)
    assert isinstance(plain, dict)
    return plain
