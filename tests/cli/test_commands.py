"""The door itself: the first page, typos, and what each command loads."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from keepstep.cli import menu
from keepstep.cli.errors import UsageError
from keepstep.cli.main import main
from keepstep.cli.show import fold_rows

CLI = Path(menu.__file__).parent


def test_the_first_page_names_every_command() -> None:
    """The page is written by hand to be fast; it may not forget a command or invent one."""
    from keepstep.cli.commands import app

    commands = {name for name in app if not name.startswith("-")}
    assert commands | {"run", "demo"} == set(menu.COMMANDS)
    assert all(f"  {name} " in menu.page() for name in menu.COMMANDS)


@pytest.mark.parametrize("words", [[], ["--help"], ["--version"], ["run", "--help"]])
def test_help_loads_nothing_heavy(words: list[str]) -> None:
    """Help needs neither torch nor the libraries of the server, nor even those of the other commands."""
    code = (
        "import sys\nfrom keepstep.cli.main import main\n"
        f"try:\n    main({words!r})\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'starlette', 'uvicorn', 'rich', 'cyclopts', 'numpy'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"
    assert done.stdout


def test_only_device_counting_imports_torch() -> None:
    """No other module of the door imports torch, not even within a function."""
    for path in CLI.glob("*.py"):
        names = {
            alias.name.split(".")[0]
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Import)
            for alias in node.names
        }
        assert "torch" not in names or path.name == "devices_torch.py"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["statsu"], "did you mean `keepstep status`?"),
        (["frobnicate"], "`keepstep --help` lists the commands"),
        (["status", "--oops"], "--oops"),
        (["inject", "kil"], '"kil"'),
        (["inject", "kill"], "kill needs a rank"),
        (["inject", "node-loss"], "needs a node"),
        (["inject", "slow", "--rank", "1"], "--seconds"),
        (["incident"], "keepstep incident --help"),
        (["jobs", "-o", "xml"], "-o xml"),
        (["controller", "--run-dir", "x", "--listen", "a:b"], "not HOST:PORT"),
    ],
)
def test_mistakes_cost_one_paragraph(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Typos and missing words: exit code 64, one error, one way out, nothing on stdout."""
    assert main(words) == UsageError.code
    out, err = capsys.readouterr()
    assert said in err
    assert err.count("error: ") == 1
    assert out == ""


def test_no_runs_yet(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A newcomer who looks before starting anything is told what to type."""
    monkeypatch.setenv("KEEPSTEP_STATE_DIR", str(tmp_path))
    for words in (["status"], ["jobs"], ["logs"], ["incidents"], ["incident", "i1"]):
        assert main(words) == 1
        assert "keepstep run" in capsys.readouterr().err


def test_nodes_that_are_alike_share_a_row() -> None:
    """A thousand healthy nodes are one line; the odd one has its own."""
    nodes = [
        {
            "node": f"n{number:03d}",
            "role": "worker",
            "health": "SUSPECT" if number == 7 else "HEALTHY",
            "link": "up",
            "ranks": str(number),
            "standbys_parked": 1,
            "faults": 0,
        }
        for number in range(1, 11)
    ]
    rows = fold_rows(nodes)
    assert [(row["nodes"], row["health"], row["standbys_parked"]) for row in rows] == [
        ("n[001-006,008-010]", "HEALTHY", 9),
        ("n007", "SUSPECT", 1),
    ]
