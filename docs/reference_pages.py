"""The reference pages as text, made from types, docstrings and parsers of the package itself."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import keepstep
from keepstep.agent import config as agent_config
from keepstep.controlplane import config as controller_config
from keepstep.model import actions, env, exits, facts, records, settings, topology, wire
from keepstep.trainer import guard

SOURCE = Path(keepstep.__file__).parent
NOTE = "<!-- Written by docs/generate.py from the code. Change the code and run it again. -->\n\n"


def pages() -> dict[str, str]:
    """File name below ``docs/reference`` to content, for every generated page."""
    import reference_cli
    import reference_codes
    import reference_machines

    return {
        "exit-codes.md": NOTE + exit_codes(),
        "environment.md": NOTE + environment(),
        "settings.md": NOTE + setting_tables(),
        "records.md": NOTE + record_tables(),
        "cli.md": NOTE + reference_cli.page(),
        "codes.md": NOTE + reference_codes.page(),
        **reference_machines.pages(NOTE),
    }


def exit_codes() -> str:
    rows = [f"| {value} | `{name}` | {text} |" for name, value, text in constants(exits) if isinstance(value, int)]
    passed = one_line(inspect.getdoc(exits.of_worker) or "")
    return "\n".join(
        [
            "# Exit codes",
            "",
            one_line(inspect.getdoc(exits) or ""),
            "",
            "| code | name | meaning |",
            "|---:|---|---|",
            *rows,
            "",
            f"Any other code is the worker's own. {passed}",
            "",
            "A worker's own code can be one of the numbers above. `exit.json` in the run directory then tells them apart: it",
            "holds `code`, `why`, `category` and the incident.",
            "",
        ]
    )


def environment() -> str:
    names = [
        (value, text) for _, value, text in constants(env) if isinstance(value, str) and value.startswith("KEEPSTEP_")
    ]
    told = {value for value, _ in names}
    others = sorted(variables_in_source() - told)
    rows = [f"| `{value}` | {text or own_words(value)} |" for value, text in names]
    rows += [f"| `{value}` | {own_words(value)} |" for value in others]
    return "\n".join(
        [
            "# Environment variables",
            "",
            one_line((inspect.getdoc(env) or "").split("\n\n", 1)[1]),
            "",
            "Workers also get torchrun's variables, with torchrun's meaning: `RANK`, `LOCAL_RANK`, `WORLD_SIZE`, `LOCAL_WORLD_SIZE`,",
            "`GROUP_RANK`, `GROUP_WORLD_SIZE`, `ROLE_RANK`, `ROLE_WORLD_SIZE`, `ROLE_NAME`, `MASTER_ADDR`, `MASTER_PORT` and `TORCHELASTIC_*`.",
            "",
            "| variable | meaning |",
            "|---|---|",
            *rows,
            "",
        ]
    )


WORDS = {
    "KEEPSTEP_LINGER_S": "Without `keepstep run`: how long a node's memory and its keeper outlive the last rank, seconds (300).",
    "KEEPSTEP_JOB": "Set for workers: the job's id.",
    "KEEPSTEP_NODE": "Set for workers: the name of their node.",
    "KEEPSTEP_SLOT": "Set for workers: the name of their process place; its presence makes `keepstep.init` talk to an agent.",
    "KEEPSTEP_SELFTEST_MULTIPLY": "For tests: `module:function` that multiplies instead of torch in a self-test, to see what a broken machine looks like.",
    "KEEPSTEP_TOKEN_FILE": "File with the bearer token, where one is needed.",
    "KEEPSTEP_CONTROLLER": "Address of the controller for agents, HOST:PORT; default of `keepstep run --controller`.",
    "KEEPSTEP_CONTROLLER_URL": "HTTP address of the controller for people and tools; default of `--server`.",
    "KEEPSTEP_NODE_DIR": "Set for workers: memory-backed directory of their node and job.",
    "KEEPSTEP_RUN_DIR": "Set for workers: directory of the job on disk.",
    "KEEPSTEP_STATE_DIR": "Where runs are kept on disk: event log, output, losses. Default: `$XDG_STATE_HOME/keepstep`, else `~/.local/state/keepstep`.",
    "KEEPSTEP_RUNTIME_DIR": "Memory-backed directory for sockets and snapshots. Default: `/dev/shm/keepstep-<uid>`.",
    "KEEPSTEP_ROLE": "Set for workers: `worker`, or `standby` for a process that waits in `keepstep.init` for a rank.",
}


def own_words(name: str) -> str:
    from keepstep.cli.flags import build_parser

    for action in build_parser()._actions:
        if name not in WORDS and getattr(action, "variable", "") == name:
            return f"Default of `keepstep run {action.option_strings[0]}`: {cell(action.help or '')}."
    if name not in WORDS:
        raise SystemExit(
            f"environment variable {name} is read by the code but not described: add it to WORDS in {__file__}"
        )
    return WORDS[name]


def variables_in_source() -> set[str]:
    """Every ``KEEPSTEP_*`` string literal of the package."""
    found: set[str] = set()
    for path in sorted(SOURCE.rglob("*.py")):
        found |= set(re.findall(r"""["'](KEEPSTEP_[A-Z_]+)["']""", path.read_text()))
    return found


def setting_tables() -> str:
    out = ["# Settings", "", "Every limit, patience and budget has a name, a unit and a default.", ""]
    for struct in (
        settings.Policy,
        settings.CheckpointPolicy,
        guard.Guard,
        topology.JobSpec,
        topology.Layout,
        agent_config.AgentConfig,
        agent_config.Program,
        agent_config.Output,
        controller_config.ControllerConfig,
    ):
        out += [f"## {struct.__name__}", "", summary(struct), "", "| name | default | meaning |", "|---|---|---|"]
        told = attributes_of(struct)
        out += [f"| `{n}` | {default_of(struct, n)} | {told.get(n, '')} |" for n in struct.__struct_fields__]
        out.append("")
    out += ["## Limits in the code", ""]
    out += [
        "Numbers that no flag changes, with the module that names them.",
        "",
        "| name | value | module | meaning |",
        "|---|---|---|---|",
    ]
    out += [f"| `{n}` | `{v}` | `{m}` | {t} |" for m, n, v, t in limits()]
    return "\n".join([*out, ""])


def limits() -> list[tuple[str, str, str, str]]:
    """Upper-case numeric constants of the package that carry a unit or bound in their name."""
    pattern = re.compile(r"(MAX|LIMIT|BUDGET|KEEP|_S|_MS|TIMEOUT|GRACE|BATCH|QUEUE|BYTES|LINES)")
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        module = ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts)
        if module.startswith("keepstep.cli.demo"):
            continue
        for name, value, text in constants_of_text(path.read_text()):
            if pattern.search(name) and not name.startswith("_") and re.fullmatch(r"[\d._ *+<()-]+", value):
                found.append((module, name, value, text))
    return found


def record_tables() -> str:
    out = ["# Records, facts, actions and frames", ""]
    for title, module, union in (
        ("Records", records, records.AnyRecord),
        ("Facts", facts, facts.AnyFact),
        ("Actions", actions, actions.AnyAction),
    ):
        out += [f"## {title}", "", one_line(inspect.getdoc(module) or ""), ""]
        for struct in get_args(union):
            out += struct_section(struct)
    out += ["## Frames", "", one_line(inspect.getdoc(wire) or ""), ""]
    seen: set[str] = set()
    for title in ("AgentToController", "ControllerToAgent", "WorkerToAgent", "AgentToWorker", "PeerToPeer"):
        members = getattr(wire, title)
        for struct in get_args(members) or (members,):
            if struct.__name__ not in seen:
                seen.add(struct.__name__)
                out += struct_section(struct)
    return "\n".join(out)


def struct_section(struct: type) -> list[str]:
    fields = ", ".join(f"`{n}`" for n in struct.__annotations__) or "none of its own"  # inherited ones are told once
    return [f"### {struct.__name__}", "", *([summary(struct), ""] if summary(struct) else []), f"Fields: {fields}.", ""]


# ---------------------------------------------------------------- reading the code


def constants(module: ModuleType) -> list[tuple[str, Any, str]]:
    """Upper-case constants of a module with the docstring below each."""
    texts = {name: text for name, _, text in constants_of_text(inspect.getsource(module))}
    return [(name, getattr(module, name), texts[name]) for name in texts]


def constants_of_text(source: str) -> list[tuple[str, str, str]]:
    body = ast.parse(source).body
    out = []
    for at, node in enumerate(body):
        target = (
            node.targets[0]
            if isinstance(node, ast.Assign)
            else node.target
            if isinstance(node, ast.AnnAssign)
            else None
        )
        if not isinstance(target, ast.Name) or not target.id.lstrip("_").isupper() or node.value is None:
            continue
        below = body[at + 1] if at + 1 < len(body) else None
        text = ""
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str):
            text = one_line(inspect.cleandoc(below.value.value))
        out.append((target.id, ast.unparse(node.value), text))
    return out


def summary(struct: type) -> str:
    doc = struct.__dict__.get("__doc__") or ""
    return one_line(re.split(r"\n\s*(Attributes|Args|Raises):", inspect.cleandoc(doc))[0])


def attributes_of(struct: type) -> dict[str, str]:
    """What the ``Attributes:`` section of the docstring says about each field, and attribute docstrings."""
    doc = inspect.getdoc(struct) or ""
    told: dict[str, str] = {}
    current: list[str] = []
    for line in doc.partition("Attributes:")[2].splitlines():
        if named := re.match(r"    ([a-z_, ]+): (.*)", line):
            current = [n.strip() for n in named[1].split(",")]
            told |= dict.fromkeys(current, named[2])
        elif line.strip() and current:
            told |= {n: f"{told[n]} {line.strip()}" for n in current}
    return {n: cell(t) for n, t in told.items()}


def default_of(struct: Any, name: str) -> str:
    import msgspec

    value = next(f for f in msgspec.structs.fields(struct) if f.name == name)
    if value.default is not msgspec.NODEFAULT:
        if isinstance(value.default, msgspec.Struct):
            return f"see {type(value.default).__name__}"
        return f"`{value.default!r}`"
    if value.default_factory is not msgspec.NODEFAULT:
        return f"`{value.default_factory()!r}`"
    return "required"


def one_line(text: str) -> str:
    return cell(re.sub(r"\s+", " ", text).strip())


def cell(text: str) -> str:
    """Markdown for a table cell, from the reStructuredText literals of docstrings."""
    text = re.sub(r"``([^`]+)``", r"`\1`", text).replace("|", "\\|")
    return "".join(part if part.startswith("`") else part.replace("<", "&lt;") for part in re.split(r"(`[^`]*`)", text))
