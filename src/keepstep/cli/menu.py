"""The first page: what ``keepstep`` and ``keepstep --help`` show, without loading anything.

A test keeps it equal to the commands that there are.
"""

from __future__ import annotations

COMMANDS = {
    "run": "Start training: takes torchrun's flags and environment",
    "demo": "Train on four pretended nodes, break them one by one, prove that nothing was lost",
    "status": "One screen: the job, its nodes and standbys, what is wrong and what is done about it",
    "jobs": "The runs of this machine, or the jobs of a controller",
    "job": "One job in full: ranks, nodes, incidents",
    "incidents": "What went wrong in a job, and what it cost",
    "incident": "One incident: who, why, what was done",
    "proposals": "Changes of living nodes that wait for a person: why, how sure, and what holds them back",
    "approve": "Say yes to a proposal",
    "reject": "Say no to a proposal",
    "undo": "Take an eviction back: the node may be used again",
    "mode": "What automation may do to living nodes: observe, assist or auto",
    "freeze": "Stop all automation that changes living nodes",
    "thaw": "End a freeze",
    "logs": "The ranks' output, equal lines folded; --first-error shows the failure that explains the others",
    "stacks": "Where every process of a job stands now, ranks in the same place put together, the odd ones named",
    "ckpt": "Checkpoints: plan where copies lie and what they cost; list, verify, restore, hand over",
    "explain": "What a log or a fault code means: who is the culprit, what to do; works offline",
    "sdc": "Silent data corruption: who is suspected, what was tested, the verdict",
    "selftest": "Examine this machine: matrix products with known results on each core and device, memory patterns",
    "inject": "Break something on purpose, in a job started with --allow-inject",
    "stop": "End a job on all its nodes",
    "controller": "Run a controller in the foreground",
    "token": "Make the secret that is needed beyond loopback",
    "doctor": "Check this machine: kernel, memory, versions",
    "version": "Versions of keepstep, its protocol and its log",
}

_HEAD = """keepstep: training never stops. One dead rank is replaced, the others keep their processes.

usage: keepstep COMMAND [arguments]
"""
_TAIL = """
`keepstep COMMAND --help` explains one command. First steps: `keepstep doctor`, `keepstep demo`,
then `keepstep run --nproc-per-node 4 train.py` and, in another terminal, `keepstep status`."""


def page() -> str:
    width = max(map(len, COMMANDS)) + 2
    return "\n".join([_HEAD, *(f"  {name:<{width}}{what}" for name, what in COMMANDS.items()), _TAIL])
