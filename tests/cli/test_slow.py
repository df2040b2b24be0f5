"""What the page of a job says of those who are slow."""

from __future__ import annotations

import re

from tests.core.test_stragglers import Paced, slower

from keepstep.cli.plan import pace_window
from keepstep.cli.slow import SHOWN, slow_lines
from keepstep.controlplane.views import job_view


def test_one_line_says_who_since_when_why_and_what_it_costs() -> None:
    """From the controller's own answer; the rows of ``--json`` carry the same in numbers."""
    job = Paced()
    assert slow_lines(job_view(job.fleet.job)) == []
    job.pass_(5, changes={5: slower(1.3)})
    view = job_view(job.fleet.job)
    (line,) = slow_lines(view)
    assert re.fullmatch(
        r"slow: rank 5 on n2 is 1\.3x slow since \d\d:\d\d: other ranks of its node are not; costs 19 % of the job",
        line,
    )
    (row,) = view["stragglers"]
    assert (row["cause"], row["ranks"], row["nodes"], row["cost_share"]) == ("device", "5", ["n2"], 0.1923)
    assert [pace["rank"] for pace in view["paces"]] == list(range(8))
    assert view["paces"][5]["window"] == 5
    assert view["paces"][5]["own_s"] > 0.5 > view["paces"][4]["own_s"]


def test_many_lines_are_cut_and_odd_rows_do_no_harm() -> None:
    """A page stays a page, and an older controller's answer is read, too."""
    row = {"why": "rank 1 is slow", "since": None}
    lines = slow_lines({"stragglers": [row] * (SHOWN + 2)})
    assert lines[0] == "slow: rank 1 is slow"
    assert lines[-1] == "slow: 2 more; -o json has them all"
    assert slow_lines({}) == []


def test_the_length_of_a_window() -> None:
    """Off, a duration, or the policy's."""
    assert [pace_window(text) for text in (None, "off", "1s", "2m")] == [None, 0.0, 1.0, 120.0]
