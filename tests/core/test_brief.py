"""What is kept of an error text."""

from __future__ import annotations

import pytest

from keepstep.core.locate.brief import LIMIT, brief


@pytest.mark.parametrize(
    ("error", "kept"),
    [
        (
            "RuntimeError: [/build/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:52872. "
            "This is typically caused by a remote worker crashing. Check the logs of the remote worker",
            "RuntimeError: Connection closed by peer [127.0.0.1]:52872",
        ),
        ("RuntimeError: Operation timed out!\nException raised from wait", "RuntimeError: Operation timed out!"),
        ("", ""),
    ],
)
def test_only_the_message_is_kept(error: str, kept: str) -> None:
    """Source positions, advice and stack traces are left out; the peer's address stays."""
    assert brief(error) == kept


def test_it_is_bounded() -> None:
    """However long the text, one line of the incident stays readable."""
    assert len(brief("x" * 10_000)) == LIMIT
