"""``keepstep``: the door. Finds the command, and turns every error that a person can make into one paragraph.

Commands are imported when they are called: ``keepstep --help`` and ``keepstep run`` load neither each
other's needs nor, ever, torch.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence

import keepstep
from keepstep.cli import menu
from keepstep.cli.errors import DoorError, UsageError, closest


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(words)
    except DoorError as error:
        _print(error.paragraph())
        return error.code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `keepstep incidents | head`
        sys.stderr.close()
        return 141


def _dispatch(words: list[str]) -> int:
    if words[:1] == ["run"]:
        from keepstep.cli.launch import run

        return run(words[1:])
    if words[:1] == ["demo"]:
        from keepstep.cli.demo import main as demo

        return demo(words[1:])
    if not words or words[0] in ("-h", "--help", "help"):
        print(menu.page())
        return 0
    if words[0] in ("-V", "--version"):
        print(keepstep.__version__)
        return 0
    if words[0] not in menu.COMMANDS:
        near = closest(words[0], menu.COMMANDS)
        raise UsageError(
            f"there is no command {words[0]!r}",
            help=f"did you mean `keepstep {near}`?" if near else "`keepstep --help` lists the commands",
        )
    from keepstep.cli.commands import dispatch

    return dispatch(words)


def _print(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
