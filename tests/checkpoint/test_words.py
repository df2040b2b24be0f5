"""Words: what cannot be meant is refused by the name under which it was said, and what is taken makes sense."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.checkpoint import words
from keepstep.checkpoint.exceptions import BadSetting
from keepstep.model.settings import CheckpointPolicy

ZEROS = ["0", "00", "0.0", "0s", "0h", "0B", "0B/s", "0MB/s", "0%", 0, 0.0]
ABSURD = [
    "-1",
    "-5MB/s",
    "-3h",
    "nan",
    "inf",
    "1e999",
    "9" * 400 + "d",
    "9" * 400 + "TB/s",
    math.nan,
    math.inf,
    -1,
    True,
]


@pytest.mark.parametrize("read", [words.rate, words.duration, words.share])
@pytest.mark.parametrize("value", [*ZEROS, *ABSURD])
def test_zeros_and_what_is_no_number_are_refused(read: Callable[[str | float, str], float], value: str | float) -> None:
    """Never taken for 'no limit': that is said by leaving it out."""
    with pytest.raises(BadSetting, match="--it") as raised:
        read(value, "--it")
    assert str(value).strip()[:20] in str(raised.value)
    assert "for example --it" in raised.value.help


def test_a_zero_says_what_it_would_mean_and_how_to_say_no_limit() -> None:
    with pytest.raises(BadSetting, match=r"--ckpt-rate-peer '0' would let nothing through.*say none, for no limit"):
        words.rate("0", "--ckpt-rate-peer")
    with pytest.raises(BadSetting, match="not between 100 kB/s and 1000 TB/s"):
        words.rate("500B/s", "--ckpt-rate-peer")


@pytest.mark.parametrize("unsaid", ["", "none", " none "])
def test_none_is_as_good_as_left_out(unsaid: str) -> None:
    """It outdoes an environment variable."""
    assert words.rate(unsaid, "--it") == 0
    assert words.duration(unsaid, "--it") == 0


def test_numbers_that_are_no_text_are_exact() -> None:
    """A month of seconds is six digits and more."""
    assert words.duration(2_592_000, "x") == 2_592_000
    assert words.duration(1_234_567.5, "x") == 1_234_567.5
    assert words.rate(1_234_567, "x") == 1_234_567


@pytest.mark.parametrize("key", ["every", "full_every", "keep", "keep_every"])
def test_counts_have_a_ceiling(key: str) -> None:
    """No step has more digits than the name of a generation, and no chain is longer than a restore can follow."""
    with pytest.raises(BadSetting, match=f"--{key} {10**12} must be .* or less"):
        words.policy({key: 10**12}, lambda name: f"--{name}")


@given(
    st.text("0123456789.eEnaif-+ smhdkKMGTiBbt/%", max_size=12)
    | st.floats()
    | st.integers(-(10**40), 10**40)
)  # fmt: skip
def test_whatever_is_taken_can_be_kept_in_the_settings(value: str | float) -> None:
    """Finite, not negative, the same after a trip through the settings' file; or refused."""
    said = {}
    for key in ("keep_for", "rate_peer", "overhead"):
        with contextlib.suppress(BadSetting):
            words.policy({key: value}, str)
            said[key] = value
    policy = words.policy(said, str)
    assert msgspec.json.decode(msgspec.json.encode(policy), type=CheckpointPolicy) == policy
    assert 0 <= policy.keep_s <= words.MAX_DURATION_S
    assert 0 <= policy.peer_rate <= words.MOST_RATE
