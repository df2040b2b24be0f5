"""The replay benchmark keeps its bounds on a small run, and notices when they are not kept."""

from __future__ import annotations

import copy

from benchmarks.replay import report, share, within


def test_small_run_is_within_bounds_and_a_bad_one_is_not() -> None:
    """24 machines, 20 trials, fixed seed; then one position lost, one round too many, half of the searches wrong."""
    found = report([24], 20, 5)
    assert all(found["within"].values()), found["within"]
    for path, value, bound in [
        (("constant", "found_by_search"), 23, "constant_always_found"),
        (("constant", "most_rounds"), 3, "constant_in_two_rounds"),
        (("rare", "interval"), [0.5, 0.94], "rare_found_in_stated_rounds"),
        (("two_constant", "success_rate"), 0.99, "two_constant_always_found"),
        (("constant", "plan_s"), 2.0, "quick"),
    ]:
        bad = copy.deepcopy(found)
        bad["machines"]["24"][path[0]][path[1]] = value
        assert [name for name, kept in within(bad).items() if not kept] == [bound]


def test_interval_is_wilsons() -> None:
    """95 of 100: 0.8882 to 0.9785, from the tables."""
    assert share(95, 100)["interval"] == [0.8882, 0.9785]
    assert share(20, 20)["interval"][1] == 1.0
