"""The reference says what the code says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def test_generated_pages_are_up_to_date() -> None:
    """Flags, settings, records, exit codes, variables and state machines in the reference equal the code's."""
    done = subprocess.run(
        [sys.executable, "docs/generate.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_page_is_reachable() -> None:
    """No page is left out of the index."""
    listed = set(re.findall(r"^([\w/-]+)$", "\n".join(p.read_text() for p in DOCS.rglob("*.md")), re.MULTILINE))
    pages = {str(p.relative_to(DOCS).with_suffix("")) for p in DOCS.rglob("*.md") if "_build" not in p.parts}
    missing = sorted(p for p in pages - {"index"} if p not in listed and not p.startswith("decisions/"))
    assert not missing


def test_decisions_are_numbered_once() -> None:
    """Each decision has a number of its own, a status and a date."""
    pages = sorted((DOCS / "decisions").glob("[0-9]*.md"))
    numbers = [p.name[:4] for p in pages]
    assert numbers
    assert len(numbers) == len(set(numbers)), numbers
    for page in pages:
        assert re.search(r"^(- )?\*{0,2}Status:?\*{0,2}", page.read_text(), re.MULTILINE | re.IGNORECASE), (
            f"{page.name} has no status"
        )


def test_every_command_in_the_docs_exists() -> None:
    """A page never names a `keepstep` subcommand that the program does not have."""
    shown = subprocess.run(
        [sys.executable, "-m", "keepstep.cli.main", "--help"], capture_output=True, text=True, check=False
    )
    known = set(re.findall(r"[a-z]+", shown.stdout + shown.stderr))
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.rglob("*.md")]:
        for verb in re.findall(r"(?:^\s+|`|\$ )keepstep ([a-z]+)", page.read_text(), re.MULTILINE):
            assert verb in known, f"{page.relative_to(ROOT)} names `keepstep {verb}`"
