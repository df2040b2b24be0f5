"""The command line of ``keepstep run`` is torchrun's, and the words that were given become the plan that was meant."""

from __future__ import annotations

import argparse
import os
import signal
import time
from pathlib import Path

import msgspec
import pytest
from msgspec import structs

from keepstep.checkpoint import lease
from keepstep.cli import flags, policy
from keepstep.cli.banner import checkpoints
from keepstep.cli.errors import DoorError, PreflightError, UsageError
from keepstep.cli.plan import Endpoint, Plan, console, make_plan, parse_endpoint
from keepstep.model import exits
from keepstep.model.settings import CheckpointPolicy
from keepstep.model.topology import Layout

THEIRS_BY_ENVIRONMENT = ("PET_NNODES", "PET_MAX_RESTARTS", "PET_STANDALONE")


def torchruns_parser() -> argparse.ArgumentParser:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from torch.distributed.run import get_args_parser

    return get_args_parser()


def plan_of(*argv: str, environ: dict[str, str] | None = None) -> Plan:
    return make_plan(flags.parse(argv, environ or {}))


def refused(kind: type[DoorError], *argv: str, environ: dict[str, str] | None = None) -> str:
    with pytest.raises(kind) as caught:
        plan_of(*argv, environ=environ)
    return caught.value.paragraph()


class TestParity:
    """Against the parser of the installed torch, so that a newer torch shows up here."""

    def test_every_option_of_torchrun_is_accepted_under_the_same_names(self) -> None:
        """Each spelling torchrun has leads to the same destination here, with a value or without."""
        ours = {name: action for action in flags.build_parser()._actions for name in action.option_strings}
        for action in torchruns_parser()._actions:
            for name in action.option_strings:
                assert name in ours, f"torchrun accepts {name}, keepstep run does not"
                assert ours[name].dest == action.dest, name
                assert (ours[name].nargs == 0) == (action.nargs == 0), f"{name} takes a value in only one of the two"

    def test_types_and_choices_are_torchruns(self) -> None:
        """A value torchrun understands is understood here."""
        ours = {action.dest: action for action in flags.build_parser()._actions}
        for action in torchruns_parser()._actions:
            mine = ours[action.dest]
            if action.choices is not None:
                assert mine.choices is not None
                assert set(action.choices) <= set(mine.choices), action.dest
            if action.type in (int, float):
                assert mine.type is action.type, action.dest

    def test_defaults_are_torchruns_but_for_a_named_list(self) -> None:
        """Where a default differs, the difference is written down in one place."""
        ours = {action.dest: action.default for action in flags.build_parser()._actions}
        for action in torchruns_parser()._actions:
            if action.dest in flags.DIFFERENT_DEFAULTS:
                assert ours[action.dest] == flags.DIFFERENT_DEFAULTS[action.dest]
            elif action.nargs == 0 and action.dest != "help":
                assert bool(ours[action.dest]) == bool(action.default), action.dest
            elif action.dest not in ("help", "training_script", "training_script_args"):
                assert ours[action.dest] == action.default, action.dest

    @pytest.mark.parametrize(
        "argv",
        [
            ["--nproc_per_node=4", "train.py", "--lr", "0.1"],
            ["--nproc-per-node", "4", "train.py", "--nproc-per-node", "9", "-m"],
            [
                "--nnodes",
                "2:3",
                "--rdzv-backend",
                "c10d",
                "--rdzv_endpoint",
                "h:1",
                "--rdzv-id",
                "x",
                "-m",
                "pkg.mod",
                "-h",
            ],
            ["--node-r", "1", "--nnodes", "2", "--master-a", "h", "--master_p", "77", "t.py"],
            ["--standal", "--no-python", "./prog", "--", "-x"],
            ["-r", "3", "-t", "0:1,1:2", "--log_dir", "/x", "--local_ranks_filter=0,1", "t.py"],
            ["--signals-to-handle", "SIGUSR1", "--run-path", "/abs/t.py"],
            ["--duplicate-stdout-filters", "a,,b,c", "t.py"],
            ["--", "t.py", "--x"],
        ],
    )
    def test_the_same_words_mean_the_same(self, argv: list[str]) -> None:
        """Both parsers, given the same words (abbreviations, both spellings, script's flags), agree on every value."""
        theirs, ours = vars(torchruns_parser().parse_args(argv)), vars(flags.parse(argv, {}))
        for name, value in theirs.items():
            if name in flags.DIFFERENT_DEFAULTS and name not in ours["given"]:
                continue
            assert ours[name] == value or (not ours[name] and not value), name

    def test_environment_defaults(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """PET_* sets a default, a flag beats it, and a switch is set by 1 and cleared by 0."""
        environ = {"PET_NNODES": "3", "PET_MAX_RESTARTS": "7", "PET_STANDALONE": "0", "PET_NODE_RANK": "1"}
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        theirs, ours = vars(torchruns_parser().parse_args(["t.py"])), vars(flags.parse(["t.py"], environ))
        assert {n: ours[n] for n in ("nnodes", "max_restarts", "standalone", "node_rank")} == {
            n: theirs[n] for n in ("nnodes", "max_restarts", "standalone", "node_rank")
        }
        assert flags.parse(["--nnodes", "2", "t.py"], environ).nnodes == "2"
        assert "PET_MAX_RESTARTS='many'" in refused(UsageError, "t.py", environ={"PET_MAX_RESTARTS": "many"})

    def test_our_flags_leave_torchruns_abbreviations_alone(self) -> None:
        """``--stand`` is --standalone as in torchrun, although --standby and --standbys begin like it."""
        assert flags.parse(["--stand", "t.py"], {}).standalone
        assert flags.parse(["--standbys", "2", "t.py"], {}).standbys == 2
        assert flags.parse(["--allow-i", "t.py"], {}).allow_inject


def test_words_for_numbers_of_ranks() -> None:
    """auto, gpu, cpu and xpu count what torchrun would count; another word is refused."""
    from torch.distributed.run import determine_local_world_size

    from keepstep.cli.devices_torch import count

    for word in ("cpu", "auto"):
        assert count(word) == determine_local_world_size(word)
    for word in ("gpu", "xpu"):
        try:
            theirs = determine_local_world_size(word)
        except ValueError:
            with pytest.raises(ValueError, match="not available"):
                count(word)
        else:
            assert count(word) == theirs
    with pytest.raises(ValueError, match="neither a number"):
        count("many")


class TestPlan:
    """The judgement on the words."""

    def test_one_node_needs_no_endpoint(self) -> None:
        """A plain command is a job of one node whose controller takes free ports; others are remarked on."""
        assert plan_of("t.py").alone
        plan = plan_of("--master-port", "1234", "t.py")
        assert plan.alone
        assert any("--master-port has no effect" in line for line in plan.remarks)

    def test_endpoints_of_several_nodes(self) -> None:
        """Static rendezvous means --master-addr and --master-port, c10d --rdzv-endpoint, with torchrun's ports."""
        assert plan_of("--nnodes", "2", "--master-addr", "n0", "t.py").endpoint == Endpoint("n0", 29500)
        assert plan_of("--nnodes", "2", "--master-addr", "n0", "--master-port", "7", "t.py").endpoint == Endpoint(
            "n0", 7
        )
        c10d = ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint")
        assert plan_of(*c10d, "n0", "t.py").endpoint == Endpoint("n0", 29400)
        assert plan_of(*c10d, "[fd00::1]:5", "t.py").endpoint == Endpoint("fd00::1", 5)
        assert plan_of("--standby-nodes", "1", "t.py").endpoint == Endpoint("127.0.0.1", 29500)
        assert plan_of("--controller", "c:9", "t.py").hosts == "never"

    def test_a_standby_node_has_no_number(self) -> None:
        """torchrun scripts give each node a number; a spare one is numbered by the controller when it steps in."""
        argv = ("--nnodes", "2", "--node-rank", "2", "--standby-nodes", "1", "--standby", "t.py")
        assert plan_of(*argv).node_rank is None
        assert plan_of("--nnodes", "2", "--node-rank", "1", "t.py").node_rank == 1

    def test_rendezvous_configuration(self) -> None:
        """join_timeout and last_call_timeout carry over; a misspelt key is remarked on, with the right one."""
        plan = plan_of("--rdzv-conf", "join_timeout=5,last_call_timeout=2,join_timout=3", "t.py")
        assert (plan.join_timeout_s, plan.last_call_s) == (5.0, 2.0)
        assert any("did you mean join_timeout?" in line for line in plan.remarks)

    def test_flags_without_effect_are_said_not_refused(self) -> None:
        """Each torchrun flag that does nothing here costs one line, and only when it was given."""
        plan = plan_of("--numa-binding", "node", "--shutdown-timeout", "3", "--start-method", "fork", "t.py")
        assert len(plan.remarks) == 3
        assert not plan_of("t.py").remarks

    def test_console_is_what_torchrun_would_show(self) -> None:
        """--redirects takes a stream away from the console, --tee gives it back."""
        assert console("0", "0") == {"*": 3}
        assert console("3", "0") == {"*": 0}
        assert console("3", "1") == {"*": 1}
        assert console("0:3,1:1", "0:2") == {"*": 3, "0": 2, "1": 2}

    def test_program_kinds(self) -> None:
        """The forms of torchrun; --run-path takes precedence over --no-python."""
        assert plan_of("t.py", "-m").program.args == ("-m",)
        assert plan_of("-m", "pkg.mod").program.kind == "module"
        assert plan_of("--no-python", "prog").program.kind == "executable"
        assert plan_of("--run-path", "--no-python", "/t.py").program.kind == "run_path"

    def test_signals(self) -> None:
        """Names become signals, without duplicates."""
        assert plan_of("--signals-to-handle", "SIGTERM,SIGUSR1,SIGTERM", "t.py").signals == (
            signal.SIGTERM,
            signal.SIGUSR1,
        )

    def test_ipv6_and_hosts(self) -> None:
        """Endpoints in all forms people write."""
        assert parse_endpoint("host:1", 9, "-") == Endpoint("host", 1)
        assert parse_endpoint(":1", 9, "-") == Endpoint("localhost", 1)
        assert parse_endpoint("[::1]", 9, "-") == Endpoint("::1", 9)
        assert parse_endpoint("fd00::1", 9, "-") == Endpoint("fd00::1", 9)
        assert str(Endpoint("::1", 9)) == "[::1]:9"


BAD_USAGE = [
    (["--nprocs", "2", "t.py"], "did you mean"),
    (["--max-restarts", "-1", "t.py"], "--max-restarts -1"),
    (["--max-restarts", "x", "t.py"], "invalid int value: 'x'"),
    (["--nnodes", "2:1", "t.py"], "MIN <= MAX"),
    (["--nnodes", "two", "t.py"], "neither N nor MIN:MAX"),
    (["--rdzv-conf", "join_timeout", "t.py"], "not KEY=VALUE"),
    (["--rdzv-conf", "join_timeout=soon", "t.py"], "not a number of seconds"),
    (["--rdzv-backend", "etcd", "t.py"], "is not available"),
    (["--controller", "host", "t.py"], "has no port"),
    (["--nnodes", "2", "--rdzv-endpoint", "h:99999", "t.py"], "not HOST:PORT"),
    (["--nnodes", "2", "--rdzv-endpoint", "h:0", "t.py"], "port 0"),
    (["--hang-detect", "soon", "t.py"], "not auto, off or a duration"),
    (["--pace-window", "100ms", "t.py"], "not off or a duration of at least 1s"),
    (["--redirects", "7", "t.py"], "--redirects '7'"),
    (["--local-ranks-filter", "a", "t.py"], "not a list of numbers"),
    (["--signals-to-handle", "SIGTRM", "t.py"], "did you mean SIGTERM?"),
    (["--signals-to-handle", "SIGKILL", "t.py"], "cannot be handled"),
    (["--no-python", "-m", "t"], "exclude each other"),
    (["--monitor-interval", "0", "t.py"], "--monitor-interval 0"),
    (["--job", "a/b", "t.py"], "is not a name"),
    (["--start", "sideways", "t.py"], "invalid choice"),
    (["--ckpt-every", "0", "t.py"], "--ckpt-every 0 must be 1 or more"),
    (["--ckpt-full-every", "0", "t.py"], "--ckpt-full-every 0"),
    (["--ckpt-keep", "0", "t.py"], "--ckpt-keep 0"),
    (["--ckpt-keep-every", "-1", "t.py"], "--ckpt-keep-every -1"),
    (["--ckpt-keep-for", "1 fortnight", "t.py"], "--ckpt-keep-for '1 fortnight' is not a duration"),
    (["--ckpt-sdc-window", "6", "t.py"], "--ckpt-sdc-window '6' is not a duration"),
    (["--ckpt-overhead", "200%", "t.py"], "--ckpt-overhead '200%'"),
    (["--ckpt-rate-peer", "fast", "t.py"], "--ckpt-rate-peer 'fast' is not a rate"),
    (["--ckpt-rate-remote", "0.1B/s", "t.py"], "--ckpt-rate-remote"),
    (["--ckpt-rate-peer", "0", "t.py"], "--ckpt-rate-peer '0' would let nothing through"),
    (["--ckpt-rate-local", "0B/s", "t.py"], "--ckpt-rate-local '0B/s' would let nothing through"),
    (["--ckpt-rate-remote", "0", "t.py"], "--ckpt-rate-remote '0' would let nothing through"),
    (["--ckpt-keep-for", "0", "t.py"], "--ckpt-keep-for '0' must be above 0"),
    (["--ckpt-overhead", "0%", "t.py"], "--ckpt-overhead '0%' is no share above 0%"),
    (["--ckpt-full-every", "1000", "t.py"], "--ckpt-full-every 1000 must be 200 or less"),
    (["--ckpt-dir", "s3a://bucket/x", "t.py"], "there is no s3a:// here"),
    (["--ckpt-dir", "s3://", "t.py"], "names no bucket"),
    (["--ckpt-dir", "file://other/x", "t.py"], "names no directory of this machine"),
    (["--ckpt-local-dir", "s3://bucket/x", "t.py"], "is not on this node's disk"),
    (["--ckpt-local-dir", "/x", "--ckpt-dir", "/x", "t.py"], "are both /x"),
    (["--layout", "tp=8,xp=2", "t.py"], "'xp=2' is none of"),
    (["--layout", "tp=0", "t.py"], "'tp=0'"),
    (["--rack", "a b", "t.py"], "--rack 'a b' is not a name"),
    ([], "no training script given"),
]

BAD_WORLDS = [
    (["--nproc-per-node", "0", "t.py"], "no ranks"),
    (["--standby-nodes", "2", "t.py"], "larger than --nnodes 1"),
    (["--standalone", "--nnodes", "2", "t.py"], "can never be met"),
    (["--nnodes", "2", "--node-rank", "2", "t.py"], "outside of --nnodes"),
]


@pytest.mark.parametrize(("argv", "words"), BAD_USAGE)
def test_wrong_words_are_refused_in_one_paragraph(argv: list[str], words: str) -> None:
    """Each wrong flag names itself and its value, and the error carries exit code 64."""
    paragraph = refused(UsageError, *argv)
    assert words in paragraph
    assert len(paragraph.splitlines()) <= 2
    assert UsageError.code == exits.BAD_USAGE


@pytest.mark.parametrize(("argv", "words"), BAD_WORLDS)
def test_worlds_that_cannot_be_are_refused(argv: list[str], words: str) -> None:
    """Flags that are fine one by one but ask for an impossible world: exit code 66."""
    paragraph = refused(PreflightError, *argv)
    assert words in paragraph
    assert "help: " in paragraph


class TestCheckpoints:
    """The policy that the flags mean."""

    def test_nothing_said_is_the_default_policy(self) -> None:
        """Without a flag there is no durable tier and no limit."""
        plan = plan_of("t.py")
        assert plan.ckpt == CheckpointPolicy()
        assert plan.layout is None
        assert not plan.rack

    def test_every_flag_arrives(self) -> None:
        """Each flag fills its own field, in the unit of the policy."""
        plan = plan_of(
            *("--ckpt-dir", "s3://bucket/run/", "--ckpt-local-dir", "/nvme/ckpt", "--ckpt-every", "50"),
            *("--ckpt-full-every", "10", "--ckpt-keep", "5", "--ckpt-keep-every", "1000", "--ckpt-keep-for", "24h"),
            *("--ckpt-sdc-window", "90m", "--ckpt-overhead", "1.5%", "--ckpt-rate-peer", "25Gbit/s"),
            *("--ckpt-rate-local", "2GiB/s", "--ckpt-rate-remote", "500MB/s", "--no-resume", "t.py"),
        )
        assert plan.ckpt == CheckpointPolicy(
            overhead=0.015,
            dir="s3://bucket/run",
            local_dir="/nvme/ckpt",
            every=50,
            full_every=10,
            keep=5,
            keep_every=1000,
            keep_s=86400.0,
            sdc_window_s=5400.0,
            peer_rate=3_125_000_000,
            local_rate=2 << 30,
            remote_rate=500_000_000,
            resume=False,
        )

    def test_environment_sets_defaults(self) -> None:
        """KEEPSTEP_CKPT_* and KEEPSTEP_RACK are defaults, and a flag beats them."""
        environ = {
            "KEEPSTEP_CKPT_DIR": "/a",
            "KEEPSTEP_CKPT_EVERY": "7",
            "KEEPSTEP_RACK": "r1",
            "KEEPSTEP_NO_RESUME": "1",
        }
        plan = plan_of("t.py", environ=environ)
        assert (plan.ckpt.dir, plan.ckpt.every, plan.rack, plan.ckpt.resume) == ("/a", 7, "r1", False)
        assert plan_of("--ckpt-dir", "/b", "t.py", environ=environ).ckpt.dir == "/b"

    def test_paths_become_absolute_and_file_urls_become_paths(self) -> None:
        """All processes of the job run elsewhere than the launcher."""
        assert plan_of("--ckpt-dir", "here", "t.py").ckpt.dir == os.path.abspath("here")
        assert plan_of("--ckpt-dir", "file:///data/x", "t.py").ckpt.dir == "/data/x"

    def test_flags_without_a_tier_are_remarked_on(self) -> None:
        """An interval of something that is not written is most likely a forgotten --ckpt-dir."""
        assert any("--ckpt-every without effect" in line for line in plan_of("--ckpt-every", "5", "t.py").remarks)
        assert not plan_of("--ckpt-every", "5", "--ckpt-dir", "/x", "t.py").remarks

    def test_layouts_fit_the_world_or_are_refused(self) -> None:
        """dp may be left out; a product that is not the world is named with the world."""
        asked = plan_of("--layout", "tp=2,pp=3", "t.py").layout
        assert policy.fit(asked, 24) == Layout(tp=2, pp=3, dp=4)
        assert policy.fit(None, 24) == Layout()
        with pytest.raises(PreflightError, match="tp 2 x pp 3 does not make the 8 ranks"):
            policy.fit(asked, 8)

    def test_a_directory_that_cannot_be_written_is_refused_before_the_run(self, tmp_path: Path) -> None:
        """The probe writes and leaves nothing; a file in the way is named with the flag."""
        policy.check(
            CheckpointPolicy(dir=str(tmp_path / "new" / "deep"), local_dir=str(tmp_path / "local")), tmp_path / "state"
        )
        assert list((tmp_path / "new" / "deep").iterdir()) == []
        (tmp_path / "file").write_text("")
        with pytest.raises(PreflightError, match=r"--ckpt-dir .*file/x cannot be written"):
            policy.check(CheckpointPolicy(dir=str(tmp_path / "file" / "x")), tmp_path / "state")
        with pytest.raises(PreflightError, match="file cannot be written: it is a file"):
            policy.check(CheckpointPolicy(dir=str(tmp_path / "file")), tmp_path / "state")

    def test_a_directory_that_another_running_job_writes_to_is_told_of(self, tmp_path: Path) -> None:
        """Not the job's own, not what a dead or silent writer left, not what nobody has written."""
        asked = CheckpointPolicy(dir=str(tmp_path), local_dir="s3://never-asked/x")
        assert policy.taken(asked, "mine") == []
        living = lease.mine("other", "1", time.time_ns())
        for found, job, said in (
            (living, "mine", True),
            (living, "other", False),
            (structs.replace(living, start="1"), "mine", False),
            (structs.replace(living, at_ns=living.at_ns - int(lease.LEASE_S * 1e9)), "mine", False),
        ):
            (tmp_path / lease.LEASE).write_bytes(msgspec.json.encode(found))
            remarks = policy.taken(asked, job)
            assert len(remarks) == said
            assert not said or "--ckpt-dir" in remarks[0]
            assert not said or "is being written by job other" in remarks[0]
        assert policy.taken(CheckpointPolicy(dir=str(tmp_path / "new")), "mine") == []
        assert not (tmp_path / "new").exists()

    def test_the_banner_shows_the_arithmetic(self) -> None:
        """What memory is taken and where generations go is said before the run."""
        alone = checkpoints(plan_of("t.py"), 4, 8 << 30)
        assert "2 x its state" in alone[0]
        assert "at most 1.0 GiB of state each" in alone[0]
        assert alone[1].startswith("NOT protected")
        flags_ = ("--nnodes", "2", "--ckpt-dir", "/x", "--ckpt-full-every", "10", "t.py")
        full = checkpoints(plan_of(*flags_), 1, 12 << 30)
        assert "6 x its state" in full[0]
        assert "at most 2.0 GiB" in full[0]
        assert "in /x, in full every 10" in full[1]
