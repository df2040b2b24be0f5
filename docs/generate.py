"""Write the reference pages that repeat what the code says, so that they cannot say anything else.

    python docs/generate.py           # writes docs/reference/*.md and the drawings of the state machines
    python docs/generate.py --check   # writes nothing; exit code 1 and a list when a page is out of date

The pages are kept in git for readers; ``tests/docs`` runs the check.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from reference_pages import pages

HERE = Path(__file__).parent / "reference"


def stale() -> list[str]:
    """Names of the pages whose text is not what the code says today."""
    wanted = pages()
    return sorted(name for name, text in wanted.items() if not same(HERE / name, text))


def same(path: Path, text: str) -> bool:
    return path.exists() and path.read_text() == text


def main() -> int:
    if "--check" in sys.argv[1:]:
        for name in stale():
            print(f"docs/reference/{name} is out of date; run: python docs/generate.py")
        return 1 if stale() else 0
    HERE.mkdir(exist_ok=True)
    for name, text in pages().items():
        if not same(HERE / name, text):
            (HERE / name).write_text(text)
            print(f"wrote docs/reference/{name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
