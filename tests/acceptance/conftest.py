"""Fixtures of the acceptance tests: an undisturbed run to compare with, and clusters that are always cleaned up."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.acceptance.checks import REFERENCE_STEPS, WORLD, MakeCluster

from keepstep.cli.demo import clean_environment
from keepstep.cli.demo_cluster import Cluster

HERE = Path(__file__).parent
REFERENCE_LIMIT_S = 110.0


@pytest.fixture
def make_cluster(tmp_path: Path) -> Iterator[MakeCluster]:
    """Makes clusters; afterwards nothing of them may be left, whatever the test did."""
    made: list[Cluster] = []

    def make(name: str = "job", **options: Any) -> Cluster:
        options.setdefault("script", HERE / "small_train.py")
        cluster = Cluster(tmp_path / name, job=name, environ=clean_environment(), **options)
        made.append(cluster)
        return cluster

    yield make
    orphans = [line for cluster in made for line in cluster.close()]
    assert not orphans, f"left behind: {orphans}"


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run directory of ``small_train.py`` without any fault."""
    home = tmp_path_factory.mktemp("undisturbed")
    cluster = Cluster(
        home,
        job="undisturbed",
        script=HERE / "small_train.py",
        args=("--steps", str(REFERENCE_STEPS)),
        nodes=1,
        nproc=WORLD,
        flags=("--standbys", "0"),
        environ=clean_environment(),
    )
    try:
        cluster.start()
        codes = cluster.wait(REFERENCE_LIMIT_S)
        assert codes == {"node-0": 0}, cluster.tail()
    finally:
        assert not cluster.close()
    return cluster.run_dir
