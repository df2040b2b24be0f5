"""Mounts: an empty mount point is not taken for a new store, on this node or on another one."""

from __future__ import annotations

from pathlib import Path

import pytest

from keepstep.checkpoint import mounts
from keepstep.checkpoint.exceptions import TierAway
from keepstep.checkpoint.tiers.directory import MARKER
from keepstep.checkpoint.tiers.open import open_tier
from keepstep.cli import places, policy
from keepstep.cli.errors import PreflightError
from keepstep.model.settings import CheckpointPolicy


class Machine:
    """What is mounted and what should be, in place of this machine's."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self.root, self._info, self._tab = root, root / "mountinfo", root / "fstab"
        patch.setattr(mounts, "MOUNTINFO", self._info)
        patch.setattr(mounts, "FSTAB", self._tab)
        self.mounted()
        self.meant()

    def mounted(self, *points: Path, kind: str = "nfs4") -> None:
        lines = [f"{n} 1 0:{n} / {_octal(point)} rw - {kind} server:/x rw" for n, point in enumerate(points, 20)]
        self._info.write_text("\n".join(["10 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw", *lines, "cut off"]))

    def meant(self, *points: Path, kind: str = "nfs4", options: str = "defaults") -> None:
        lines = [f"server:/x {_octal(point)} {kind} {options} 0 0" for point in points]
        self._tab.write_text("\n".join(["# /data none", "/dev/sda1 / ext4 rw 0 1", "UUID=1 none swap sw", *lines]))


def _octal(path: Path) -> str:
    return str(path).replace(" ", "\\040")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


@pytest.mark.parametrize("below", [".", "runs/7"])
def test_what_the_system_would_mount_has_to_be_mounted(machine: Machine, tmp_path: Path, below: str) -> None:
    """Whoever opens the tier, to read or to write, is told; nothing is made there. With the mount all is well."""
    point = tmp_path / "the data"
    place = point / below
    machine.meant(point)
    for create in (False, True):
        with pytest.raises(TierAway, match=r"server:/x \(nfs4\) at .*the data, and nothing is mounted there; mount it"):
            open_tier(str(place), create=create, budget_s=0)
    assert not place.exists()
    machine.mounted(point)
    open_tier(str(place), create=True)


def test_what_is_fine_is_left_alone(machine: Machine, tmp_path: Path) -> None:
    """A file system below the named one (a container's volume), one that is left unmounted on purpose, another path."""
    data = tmp_path / "data"
    machine.meant(data)
    assert mounts.missing(data / "run")
    assert not mounts.missing(tmp_path / "database")
    machine.mounted(data / "run")
    assert not mounts.missing(data / "run" / "7")
    machine.mounted()
    machine.meant(data, options="noauto,user")
    assert not mounts.missing(data / "run")
    machine.meant(data, kind="tmpfs")
    assert not mounts.missing(data / "run")


def test_a_machine_that_tells_nothing_refuses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MOUNTINFO", "FSTAB"):
        monkeypatch.setattr(mounts, name, tmp_path / "none")
    assert mounts.covering(tmp_path) is None
    assert not mounts.missing(tmp_path)


def test_a_link_counts_as_where_it_leads(machine: Machine, tmp_path: Path) -> None:
    machine.meant(tmp_path / "data")
    (tmp_path / "link").symlink_to(tmp_path / "data" / "run")
    assert mounts.missing(tmp_path / "link")


class TestAnotherNode:
    """Without an entry in the system's table: what an earlier run has seen, in the shared state directory."""

    def test_a_run_that_goes_on_where_nothing_is_mounted_is_refused(self, machine: Machine, tmp_path: Path) -> None:
        """The first node has it mounted, the second does not: refused before the start, and nothing is made there."""
        point, state = tmp_path / "nfs", tmp_path / "state"
        settings = CheckpointPolicy(dir=str(point / "run7"))
        machine.mounted(point)
        policy.check(settings, state)
        (point / "run7").rmdir()  # the second node's mount point is bare
        machine.mounted()
        with pytest.raises(PreflightError, match=r"an earlier run found server:/x \(nfs4\) at .*/nfs, and nothing"):
            policy.check(settings, state)
        assert not (point / "run7").exists()
        machine.mounted(point)
        policy.check(settings, state)

    def test_who_emptied_or_moved_it_may_go_on(self, machine: Machine, tmp_path: Path) -> None:
        """The same file system without the directory; another one with a marker."""
        point, state = tmp_path / "nfs", tmp_path / "state"
        settings = CheckpointPolicy(dir=str(point / "run7"))
        machine.mounted(point)
        policy.check(settings, state)
        (point / "run7").rmdir()
        policy.check(settings, state)
        machine.mounted()
        (point / "run7" / MARKER).touch()
        policy.check(settings, state)
        (point / "run7" / MARKER).unlink()
        policy.check(settings, state)  # remembered where it lies now

    def test_what_cannot_be_read_or_written_is_no_reason(self, machine: Machine, tmp_path: Path) -> None:
        state = tmp_path / "state"
        state.mkdir()
        (state / places.PLACES).write_text("{")
        assert not places.lost(tmp_path, state)
        places.remember(tmp_path, tmp_path / "fstab" / "below a file")
        places.remember(tmp_path / "x", state)
        assert not places.lost(tmp_path / "x", state)
