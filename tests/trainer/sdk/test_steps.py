"""Using the loop wrongly is said at once, with the way it is meant."""

from __future__ import annotations

import pytest

from keepstep.trainer.exceptions import StepMisused
from keepstep.trainer.steps import PlainLoop, describe_error


def test_the_loop_counts() -> None:
    """Without an agent the steps are numbered from ``start`` to ``total - 1``."""
    seen = []
    for step in PlainLoop(5, 2).run():
        with step:
            seen.append(step.index)
            step.commit(loss=1.0)
    assert seen == [2, 3, 4]


def test_a_step_without_commit_is_an_error() -> None:
    """A forgotten commit would silently train without any protection."""
    step = next(PlainLoop(1, 0).run())
    with pytest.raises(StepMisused, match=r"step 0 ended without step.commit"), step:
        pass


def test_commit_belongs_into_its_own_step_once() -> None:
    """Outside, twice, and entering twice are refused."""
    step = next(PlainLoop(1, 0).run())
    with pytest.raises(StepMisused, match="inside `with step:`"):
        step.commit()
    with step:
        step.commit()
        with pytest.raises(StepMisused, match="twice"):
            step.commit()
    with pytest.raises(StepMisused, match="inside"):
        step.commit()
    with pytest.raises(StepMisused, match="entered twice"), step:
        pass


def test_a_step_that_is_not_used_is_an_error() -> None:
    """``for step in ks.steps(n)`` without ``with step:`` trains without any protection."""
    loop = PlainLoop(3, 0).run()
    next(loop)
    with pytest.raises(StepMisused, match="write `with step:`"):
        next(loop)


def test_exceptions_pass_through_and_break_is_fine() -> None:
    """A user's own exceptions are never swallowed where no agent is; leaving the loop early is allowed."""
    for step in PlainLoop(3, 0).run():
        with pytest.raises(KeyError), step:
            raise KeyError("x")
        break
    step = next(PlainLoop(1, 0).run())
    with pytest.raises(KeyboardInterrupt), step:
        raise KeyboardInterrupt


def test_an_error_is_described_by_the_users_own_line() -> None:
    """Library frames are not where the fault is: the innermost line of the user's code is."""

    def innermost() -> None:
        step = next(PlainLoop(1, 0).run())
        step.commit()

    with pytest.raises(StepMisused) as caught:
        innermost()
    error = describe_error(caught.value, step=7, consequence=True)
    assert (error.type, error.function, error.step, error.consequence) == ("StepMisused", "innermost", 7, True)
    assert error.file == __file__
    assert error.signature == f"StepMisused@{__file__}:{error.line}"
