"""Search for a faulty machine by replay, from a shell; the verdict is one JSON object on standard output.

    python -m keepstep.probes --workers workers.json --record search.jsonl --unit 2 -- python short.py

``workers.json`` is a list of objects with ``machine`` and, where needed, ``host``, ``prefix`` (words of the way there)
and ``environ``. Called again with the same words it goes on where it was. Exit code 0: found, or nobody is at fault; 1:
open, or more than a few machines fail; 2: the search could not be made, and a sentence on standard error says why.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import msgspec

from keepstep.core.locate.replay_posterior import Prior
from keepstep.core.locate.replay_search import Terms
from keepstep.probes.exceptions import ProbeError
from keepstep.probes.groups import Job, Worker
from keepstep.probes.replay import examine


def main(words: list[str]) -> int:
    at = words.index("--") if "--" in words else len(words)
    own, command = words[:at], words[at + 1 :]
    ask = argparse.ArgumentParser(
        prog="python -m keepstep.probes",
        usage="%(prog)s --workers FILE --record FILE [options] -- COMMAND ...",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    ask.add_argument("--workers", type=Path, required=True, help="JSON list of machines")
    ask.add_argument("--record", type=Path, required=True, help="file that the search is kept in")
    ask.add_argument("--unit", type=int, default=1, help="machines of one model replica")
    ask.add_argument("--size", type=int, default=0, help="wanted machines per group")
    ask.add_argument("--rate", type=float, action="append", help="hit rate to expect; may be given several times")
    ask.add_argument("--everyone", action="store_true", help="go on after the first faulty machine")
    ask.add_argument("--rounds", type=int, default=1000, help="budget")
    ask.add_argument("--deadline", type=float, default=600.0, metavar="S", help="seconds after which a group has hung")
    ask.add_argument("--parallel", type=int, default=0, help="groups at the same time; 0 is all")
    ask.add_argument("--port", type=int, default=0, help="first port at which groups meet; 0 takes free ones here")
    ask.add_argument("--expected", default="", help="checksum that every process has to print")
    args = ask.parse_args(own)
    try:
        verdict = examine(
            msgspec.json.decode(args.workers.read_bytes(), type=list[Worker]),
            Job(
                command=tuple(command),
                deadline_s=args.deadline,
                parallel=args.parallel,
                port=args.port,
                expected=args.expected,
            ),
            record=args.record,
            terms=Terms(unit=args.unit, size=args.size, everyone=args.everyone, most_rounds=args.rounds),
            prior=Prior(rates=tuple((rate, 1.0) for rate in args.rate)) if args.rate else Prior(),
            tell=lambda line: print(line, file=sys.stderr, flush=True),
        )
    except (ProbeError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(msgspec.json.encode(verdict).decode())
    return 0 if verdict.kind in ("found", "nobody") else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
