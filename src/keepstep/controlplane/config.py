"""What starts a controller: one JSON file written by ``keepstep run`` or ``keepstep controller``."""

from __future__ import annotations

from msgspec import Struct

from keepstep.model.settings import Policy


class ControllerConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything a controller needs to know.

    Attributes:
        run_dir: holds ``log.sqlite`` and, once the controller listens, ``controller.json``.
        host: address to listen on; beyond loopback ``token_file`` is required.
        agent_port, http_port: 0 takes a free port (it is kept in ``controller.json`` and taken again after a restart).
        launcher_pid: leave when this process ends; 0 for a controller of its own.
        heartbeat_s: how often agents renew their lease.
    """

    run_dir: str
    host: str = "127.0.0.1"
    agent_port: int = 0
    http_port: int = 0
    token_file: str = ""
    launcher_pid: int = 0
    heartbeat_s: float = 0.5
    policy: Policy = Policy()
