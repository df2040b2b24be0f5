"""The rules of the house, checked over every file: layers, torch, size, words that may not appear."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "keepstep"
MODULES = sorted(SOURCE.rglob("*.py"))
MAX_LINES = 400
OUTGROWN = {"trainer/groups_torch.py": 450, "model/facts.py": 440}
"""Modules that are beyond it already: they may shrink, and may not grow. Facts are one closed vocabulary."""
SAMPLES = ROOT / "tests" / "diagnosis" / "cases"
"""Logs as they are found in the world, with the paths that are in them."""


def tracked() -> list[Path]:
    """Text files that git knows, which is what others will read."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode()
    paths = [ROOT / name for name in listed.split("\0") if name]
    return [p for p in paths if p.is_file() and p.suffix not in {".png", ".gz", ".bin", ".sqlite"}]


def imported(path: Path) -> set[str]:
    """Top-level packages that a file imports anywhere, in functions too; not what only a type checker reads."""
    tree = ast.parse(path.read_text())
    unread = {id(n) for node in ast.walk(tree) if is_type_checking(node) for n in ast.walk(node)}
    found: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in unread:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module.split(".")[0])
    return found


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def test_imports_only_go_downwards() -> None:
    """import-linter's contracts hold: floors, a mind without clock or files, a trainer without server packages."""
    tool = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([str(tool), "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_torch_is_imported_only_where_the_name_says_so() -> None:
    """A reader sees from the file name whether torch is needed; the controller and the launcher stay light."""
    wrong = [p for p in MODULES if "torch" in imported(p) and not re.search(r"(^|_)torch\.py$|^warm_torch", p.name)]
    assert not wrong, f"torch is imported in {[str(p.relative_to(ROOT)) for p in wrong]}; name such files *_torch.py"


@pytest.mark.parametrize("package", ["trainer", "checkpoint", "model", "core"])
def test_what_runs_on_every_rank_stays_light(package: str) -> None:
    """The SDK and the mind ride on the standard library, msgspec and xxhash, and on others in files named for them."""
    allowed = set(sys.stdlib_module_names) | {"keepstep", "msgspec", "torch", "numpy", "xxhash"}
    named = {"zstd": "zstandard", "obstore": "obstore", "safetensors": "safetensors"}
    for path in (SOURCE / package).rglob("*.py"):
        strangers = imported(path) - allowed - {named.get(path.stem.rsplit("_", 1)[-1], "")}
        assert not strangers, f"{path.relative_to(ROOT)} imports {sorted(strangers)}"


def test_no_module_outgrows_its_room() -> None:
    """A module has one idea. One that needs more than 400 lines has two."""
    sizes = {p.relative_to(SOURCE).as_posix(): len(p.read_text().splitlines()) for p in MODULES}
    long = {name: n for name, n in sizes.items() if n > OUTGROWN.get(name, MAX_LINES)}
    assert not long, f"split these: {long}"


def test_every_module_says_its_idea() -> None:
    """Each module starts with a docstring."""
    silent = [str(p.relative_to(ROOT)) for p in MODULES if not ast.get_docstring(ast.parse(p.read_text()))]
    assert not silent


FORBIDDEN = {
    "a path of somebody's machine": re.compile(r"/(?:work|root|home/\w+)/(?!\.)\w"),
    "a package registry": re.compile(r"(?:pypi|pythonhosted|anaconda|download\.pytorch)\.\w+", re.IGNORECASE),
    "the place where it was written": re.compile(r"(?<![\w.])shared/(?:DESIGN|STYLE|UX|RUNTIME|PEERS|FACTS|recipes)"),
}


@pytest.mark.parametrize("what", sorted(FORBIDDEN))
def test_nothing_ties_the_project_to_one_machine(what: str) -> None:
    """A clone works anywhere: no absolute paths of a developer's machine, no registry addresses."""
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in tracked()
        if path != Path(__file__) and SAMPLES not in path.parents
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if FORBIDDEN[what].search(line)
    ]
    assert not found, f"{what}:\n" + "\n".join(found)


def test_help_is_fast_and_needs_no_torch() -> None:
    """`keepstep --help` imports neither torch nor the server's packages: a person waits for it."""
    code = (
        "import sys\nfrom keepstep.cli.main import main\nsys.argv = ['keepstep', '--help']\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'starlette', 'uvicorn', 'uvloop', 'numpy'} & set(sys.modules)\n"
        "sys.stderr.write('heavy: %s' % sorted(heavy))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr.rstrip().endswith("heavy: []"), done.stderr[-2000:]


def test_the_makefile_knows_every_promised_target() -> None:
    """The README and CONTRIBUTING name make targets; each of them exists."""
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named: set[str] = set()
    for page in ("README.md", "CONTRIBUTING.md"):
        named |= set(re.findall(r"(?:^\s*|`)make ([a-z]+)", (ROOT / page).read_text(), re.MULTILINE))
    assert {"demo", "test"} <= named
    assert named <= targets, f"no such target: {sorted(named - targets)}"


def test_constraints_are_exact() -> None:
    """Two people who run `make setup` get the same versions."""
    lines = [x for x in (ROOT / "constraints.txt").read_text().splitlines() if x and not x.startswith("#")]
    loose = [x for x in lines if not re.fullmatch(r"[\w.-]+==[\w.]+", x)]
    assert not loose
