"""A real controller process: started, killed at any instant, restarted; starved of disk, ports and tokens."""

from __future__ import annotations

import asyncio
import random
import socket
import sqlite3
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from control_client import Client, joined, spec
from control_process import ControllerProcess

from keepstep import __version__
from keepstep.controlplane.folding import fold
from keepstep.controlplane.views import load_mind
from keepstep.core.controller import Controller
from keepstep.model.actions import Join
from keepstep.model.facts import (
    ActionDone,
    AgentDisconnected,
    AnyFact,
    LeaseExpired,
    LeaseRenewed,
    StandbyGone,
    StandbyReady,
    StoreReady,
)
from keepstep.model.ids import JobId, Nanos, NodeId, SlotId
from keepstep.model.records import SCHEMA, Observed
from keepstep.model.settings import Policy
from keepstep.model.wire import Acked, Orders, Refused, Reports
from keepstep.store.sqlite import open_log

KILLS = 6

pytestmark = pytest.mark.acceptance


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[ControllerProcess]:
    with ControllerProcess(tmp_path / "run") as one:
        yield one


def facts_of(run_dir: Path) -> list[AnyFact]:
    log = open_log(run_dir / "log.sqlite", readonly=True)
    try:
        return [entry.record.fact for entry in log.read() if isinstance(entry.record, Observed)]
    finally:
        log.close()


def store_ready(seq: int) -> StoreReady:
    return StoreReady(job=JobId("j"), node=NodeId("n0"), at=Nanos(1), seq=seq, host="127.0.0.1", port=7)


def chatter(seq: int) -> StandbyReady | StandbyGone:
    """Facts that keep the mind's tables small however many there are."""
    slot = SlotId(f"s{seq // 2}")
    if seq % 2:
        return StandbyGone(job=JobId("j"), node=NodeId("n0"), at=Nanos(seq), seq=seq, slot=slot, why="test")
    return StandbyReady(job=JobId("j"), node=NodeId("n0"), at=Nanos(seq), seq=seq, slot=slot)


def assert_folds_agree(run_dir: Path) -> None:
    """Snapshot plus rest gives the very state that the whole log gives."""
    log = open_log(run_dir / "log.sqlite")
    try:
        short = fold(log, Policy())
        whole = Controller(Policy())
        for entry in log.read():
            whole.evolve(entry.record)
        assert short.mind.dump() == whole.dump()
        assert short.seq == log.last()
    finally:
        log.close()


def test_from_start_to_sigterm(controller: ControllerProcess) -> None:
    """It says where it listens, takes a job in, shows it, and leaves with 0 and a snapshot of everything."""
    address = controller.start()
    assert (address.host, address.version, address.token_file) == ("127.0.0.1", __version__, "")

    async def talk() -> None:
        client, _ = await Client.welcomed(address.agent_port)
        client.report(joined(1))
        await client.acked(1)

    asyncio.run(talk())
    status, view = controller.http("/v1/status")
    assert status == 200
    assert view["schema"] == "keepstep.v1/Status"
    assert [job["job"] for job in view["jobs"]] == ["j"]
    assert view["controller"]["log"] == "ok"
    assert controller.terminate() == 0
    mind, entries = load_mind(controller.run_dir)
    assert entries
    assert mind.job(JobId("j")) is not None
    assert_folds_agree(controller.run_dir)


def test_kill_9_in_the_middle_of_batches(controller: ControllerProcess) -> None:
    """Killed again and again under load: no acknowledged report is lost, none is folded twice, folds agree."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    random.seed(seed)
    acked = sent = 0
    ports = set()

    async def life() -> int:
        """One connection that reports as fast as it can until the controller dies; the newest report acknowledged."""
        nonlocal sent
        client, welcome = await Client.welcomed(address.agent_port)
        assert welcome.acked >= acked, "an acknowledged report is gone"
        newest, sent = welcome.acked, max(sent, welcome.acked)
        client.report(*(chatter(seq) for seq in range(welcome.acked + 1, sent + 1)))
        asyncio.get_running_loop().call_later(random.uniform(0.02, 0.25), controller.process.kill)  # type: ignore[union-attr]
        try:
            while True:
                for _ in range(5):
                    sent += 1
                    client.send(Reports(facts=(chatter(sent),)))
                newest = (await client.take(Acked)).seq
        except (ConnectionError, asyncio.IncompleteReadError):
            return newest

    for _ in range(KILLS):
        address = controller.start()
        ports.add((address.agent_port, address.http_port))
        acked = max(acked, asyncio.run(life()))
        controller.kill()
        reported = [fact.seq for fact in facts_of(controller.run_dir) if fact.node and fact.seq]
        assert reported == list(range(1, len(reported) + 1)), "a report is missing or was folded twice"
        assert len(reported) >= acked
    assert len(ports) == 1, "a restarted controller was not found where it had been"
    assert acked > KILLS
    controller.start()
    assert controller.terminate() == 0
    assert_folds_agree(controller.run_dir)


def test_orders_are_repeated_after_kill_9_until_done(controller: ControllerProcess) -> None:
    """The log is the outbox: the same order, by the same id, after the controller's death; not once it is done."""
    address = controller.start()

    async def first() -> list[str]:
        client, _ = await Client.welcomed(address.agent_port)
        client.report(joined(1), store_ready(2))
        return [action.id for action in (await client.take(Orders)).actions if isinstance(action, Join)]

    async def again(acked: int) -> list[str]:
        client, welcome = await Client.welcomed(address.agent_port)
        assert welcome.acked == acked
        orders = [action.id for action in (await client.take(Orders)).actions]
        client.report(
            *(ActionDone(job=JobId("j"), node=NodeId("n0"), at=Nanos(1), seq=3, action=o) for o in orders[:1])
        )
        await client.acked(3)
        return [str(order) for order in orders]

    async def after() -> None:
        client, welcome = await Client.welcomed(address.agent_port)
        assert welcome.acked == 3
        with pytest.raises(TimeoutError):
            await client.take(Orders, seconds=0.3)

    orders = asyncio.run(first())
    assert len(orders) == 1
    controller.kill()
    controller.start()
    assert asyncio.run(again(2)) == orders
    controller.kill()
    controller.start()
    asyncio.run(after())


def test_after_a_restart_nodes_are_expected_back(tmp_path: Path) -> None:
    """A restarted controller says it was away itself; who comes back is renewed, who does not expires once."""
    with ControllerProcess(tmp_path / "run", policy=Policy(lease_s=1.0), heartbeat_s=0.1) as controller:
        address = controller.start()

        async def arrive(*nodes: str) -> None:
            connected = []  # held, or a closed connection would be noted before the end
            for node in nodes:
                client, welcome = await Client.welcomed(address.agent_port, node=node)
                client.report(joined(welcome.acked + 1, node=node))
                await client.acked(welcome.acked + 1)
                connected.append(client)
            controller.kill()

        async def one_returns() -> None:
            client, welcome = await Client.welcomed(address.agent_port, node="n0")
            client.report(joined(welcome.acked + 1, boot="b2"))
            while not [f for f in facts_of(controller.run_dir) if isinstance(f, LeaseExpired)]:
                client.report()
                await asyncio.sleep(0.05)

        asyncio.run(arrive("n0", "n1"))
        before = len(facts_of(controller.run_dir))
        controller.start()
        asyncio.run(one_returns())
        controller.kill()
        after = facts_of(controller.run_dir)[before:]
        assert {f.node for f in after if isinstance(f, AgentDisconnected) and f.ours} == {"n0", "n1"}
        assert [f.node for f in after if isinstance(f, LeaseRenewed)] == ["n0"]
        assert [f.node for f in after if isinstance(f, LeaseExpired)] == ["n1"]


def test_beyond_loopback_a_token_is_needed(tmp_path: Path) -> None:
    """Without one it does not start; with one neither an agent nor a person gets in without it."""
    with ControllerProcess(tmp_path / "bare", host="0.0.0.0") as bare:
        bare.launch()
        code, said = bare.ends_with()
        assert code == 66
        assert said.startswith("error: host 0.0.0.0 can be reached from other machines, so a token is needed")
        assert not (bare.run_dir / "controller.json").exists()
    token_file = tmp_path / "token"
    token_file.write_text("s3cret\n")
    with ControllerProcess(tmp_path / "run", host="0.0.0.0", token_file=str(token_file)) as controller:
        address = controller.start()
        assert address.token_file == str(token_file)

        async def refused(token: str) -> Refused:
            client = await Client.connect(address.agent_port)
            client.hello(token=token)
            return await client.take(Refused)

        assert "missing" in asyncio.run(refused("")).why
        assert "wrong" in asyncio.run(refused("S3cret")).why
        asyncio.run(Client.welcomed(address.agent_port, token="s3cret"))
        assert controller.http("/v1/status")[0] == 401
        assert controller.http("/v1/status", token="nope")[0] == 401
        assert controller.http("/v1/status", token="s3cret")[0] == 200
        assert "s3cret" not in controller.stderr.read_text()


@pytest.mark.parametrize("content", [None, "", " \n"])
def test_a_token_file_without_a_token(tmp_path: Path, content: str | None) -> None:
    """A missing or empty token file is named before anything is touched."""
    token_file = tmp_path / "token"
    if content is not None:
        token_file.write_text(content)
    with ControllerProcess(tmp_path / "run", token_file=str(token_file)) as controller:
        controller.launch()
        code, said = controller.ends_with()
        assert code == 66
        assert str(token_file) in said
        assert not controller.run_dir.exists()


def test_a_newer_log_is_refused(controller: ControllerProcess) -> None:
    """A log of a newer keepstep: code 65, both versions, and the log is untouched."""
    controller.run_dir.mkdir()
    open_log(controller.run_dir / "log.sqlite").close()
    raw = sqlite3.connect(controller.run_dir / "log.sqlite")
    raw.execute("UPDATE schema SET version = ?", (SCHEMA + 1,))
    raw.commit()
    raw.close()
    controller.launch()
    code, said = controller.ends_with()
    assert code == 65
    assert f"has schema {SCHEMA + 1}, this keepstep understands up to {SCHEMA}" in said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize("which", ["agent_port", "http_port"])
def test_a_port_in_use(tmp_path: Path, which: str) -> None:
    """A taken port: code 66, the port, and no address file that would send agents to a stranger."""
    with socket.create_server(("127.0.0.1", 0)) as theirs:
        port = theirs.getsockname()[1]
        with ControllerProcess(tmp_path / "run", **{which: port}) as controller:
            controller.launch()
            code, said = controller.ends_with()
            assert code == 66
            assert f"port {port} for {'agents' if which == 'agent_port' else 'HTTP'} is in use" in said
            assert not (controller.run_dir / "controller.json").exists()


def test_one_log_one_controller(controller: ControllerProcess) -> None:
    """A second controller on the same run directory leaves with 66 and the first does not notice."""
    address = controller.start()
    with ControllerProcess(controller.run_dir) as second:
        second.stderr = second.run_dir.parent / "second-stderr.log"
        second.launch()
        code, said = second.ends_with()
        assert code == 66
        assert f"another controller (pid {address.pid}) holds" in said
    assert controller.http("/v1/status")[0] == 200


def test_it_leaves_with_its_launcher(tmp_path: Path) -> None:
    """kill -9 of the launcher: the controller goes by itself, with code 0."""
    launcher = subprocess.Popen(["sleep", "1000"])
    try:
        with ControllerProcess(tmp_path / "run", launcher_pid=launcher.pid) as controller:
            controller.start()
            launcher.kill()
            launcher.wait()
            code, said = controller.ends_with()
            assert (code, said) == (0, "")
    finally:
        launcher.kill()
        launcher.wait()


def test_a_frozen_controller_does_not_blame_its_nodes(tmp_path: Path) -> None:
    """SIGSTOP for longer than the lease: the silence was the controller's own, and no node is given up."""
    policy = Policy(lease_s=1.5)
    with ControllerProcess(tmp_path / "run", policy=policy, heartbeat_s=0.1) as controller:
        address = controller.start()

        async def talk() -> None:
            client, _ = await Client.welcomed(address.agent_port)
            client.report(joined(1))
            await client.acked(1)
            frozen = asyncio.create_task(asyncio.to_thread(controller.freeze, 3.0))
            end = time.monotonic() + 4.0
            while time.monotonic() < end:
                client.report()
                await asyncio.sleep(0.1)
            await frozen
            client.report(chatter(2))
            await client.acked(2)
            assert not [f for f in facts_of(controller.run_dir) if isinstance(f, (LeaseExpired, AgentDisconnected))]

        asyncio.run(talk())


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    mount = tmp_path / "small"
    mount.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(mount)], capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip("needs the right to mount a tmpfs")
    yield mount
    subprocess.run(["umount", "-l", str(mount)], check=True)


def test_a_full_disk_is_survived(small_disk: Path, tmp_path: Path) -> None:
    """While the disk is full the controller says so, acknowledges nothing and stays; with room again it catches up."""
    controller = ControllerProcess(small_disk / "run")
    controller.config_file, controller.stderr = tmp_path / "config.json", tmp_path / "stderr.log"
    with controller:
        address = controller.start()

        async def talk() -> None:
            client, _ = await Client.welcomed(address.agent_port)
            client.report(joined(1))
            await client.acked(1)
            ballast = small_disk / "ballast"
            with ballast.open("wb", buffering=0) as file:
                try:
                    while file.write(bytes(1024)):
                        pass
                except OSError:
                    pass
            seq, refused = 1, False
            while not refused:
                for _ in range(100):
                    seq += 1
                    client.report(chatter(seq))
                view = (await asyncio.to_thread(controller.http, "/v1/status"))[1]
                refused = view["controller"]["log"] == "refusing"
            assert "bytes left on the file system" in view["controller"]["why"]
            assert "agents go on by themselves" in view["controller"]["why"]
            status, answer = await asyncio.to_thread(controller.http, "/v1/jobs/j/stop", {"why": "x"})
            assert status == 503
            assert "bytes left" in answer["error"]
            ballast.unlink()
            await client.acked(seq)
            assert (await asyncio.to_thread(controller.http, "/v1/status"))[1]["controller"]["log"] == "ok"
            reported = [f.seq for f in facts_of(controller.run_dir) if isinstance(f, (StandbyReady, StandbyGone))]
            assert reported == list(range(2, seq + 1))

        asyncio.run(talk())
        assert controller.terminate() == 0


def test_controller_loss_is_injected_after_it_is_in_the_log(controller: ControllerProcess) -> None:
    """Asked for with leave, the controller kills itself, once; the log says who asked, and a restart lives on."""
    address = controller.start()

    async def submit(allow: bool) -> None:
        client, _ = await Client.welcomed(
            address.agent_port, job=f"j{allow}", spec=spec(f"j{allow}", allow_inject=allow)
        )
        client.report(joined(1, job=f"j{allow}"))
        await client.acked(1)

    asyncio.run(submit(False))
    asyncio.run(submit(True))
    body = {"fault": "controller-loss", "by": "a test"}
    status, answer = controller.http("/v1/jobs/jFalse/inject", body)
    assert status == 403
    assert "was not started with --allow-inject" in answer["error"]
    status, answer = controller.http("/v1/jobs/jTrue/inject", body)
    assert status == 202
    assert answer["events"][0]["fact"] == "InjectRequested"
    code, _ = controller.ends_with()
    assert code == -9
    controller.start()
    assert controller.http("/v1/status")[0] == 200


def test_events_are_waited_for(controller: ControllerProcess) -> None:
    """A long poll returns with the entry as soon as it is durable, not after its whole wait."""
    address = controller.start()

    async def talk() -> tuple[float, dict[str, object]]:
        poll = asyncio.create_task(asyncio.to_thread(controller.http, "/v1/events?after=0&wait=30"))
        started = time.monotonic()
        await Client.welcomed(address.agent_port)
        status, view = await poll
        assert status == 200
        return time.monotonic() - started, view

    took_s, view = asyncio.run(talk())
    assert took_s < 10
    assert view["events"][0]["fact"] == "JobSubmitted"  # type: ignore[index]
    assert view["next"] == view["last"] >= 1  # type: ignore[operator]
    started = time.monotonic()
    status, view = controller.http(f"/v1/events?after={view['next']}&wait=0.2")
    assert (status, view["events"]) == (200, [])
    assert time.monotonic() - started >= 0.2
