"""``python -m keepstep.controlplane.main --config FILE``: one controller, until told to leave.

It leaves with code 0 on SIGTERM or when its launcher is gone, and with a paragraph on stderr and a code of
``model.exits`` when it cannot start or go on. Everything else on stderr is a log of JSON lines.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import uvloop

from keepstep.controlplane.address import is_loopback, sole_controller
from keepstep.controlplane.config import ControllerConfig
from keepstep.controlplane.exceptions import BadConfig, ControllerError, PreflightFailed
from keepstep.controlplane.logs import log_to_stderr
from keepstep.controlplane.service import serve
from keepstep.model import exits
from keepstep.store.exceptions import LogCorrupt, NewerSchema, StoreError

TOKEN_LIMIT = 4096
"""Bytes in a token file."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m keepstep.controlplane.main", description=__doc__)
    parser.add_argument("--config", required=True, type=Path, metavar="FILE", help="a ControllerConfig as JSON")
    options = parser.parse_args(arguments)
    log_to_stderr()
    try:
        run(read_config(options.config))
    except ControllerError as error:
        return _say(str(error), error.code)
    except (NewerSchema, LogCorrupt) as error:
        return _say(str(error), exits.BAD_CONFIG)
    except StoreError as error:
        return _say(str(error), exits.PREFLIGHT)
    return exits.DONE


def read_config(path: Path) -> ControllerConfig:
    """Raises ``BadConfig`` when ``path`` does not hold a controller's configuration."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=ControllerConfig)
    except OSError as error:
        raise BadConfig(f"cannot read the configuration {path}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise BadConfig(f"{path} is not a controller's configuration: {error}") from error


def run(config: ControllerConfig) -> None:
    """Check what can be checked before anything is touched, then serve."""
    for name in ("agent_port", "http_port"):
        port = getattr(config, name)
        if not 0 <= port <= 65_535:
            raise BadConfig(f"{name} ({port}) must be between 0 and 65535; 0 takes a free one")
    if config.agent_port and config.agent_port == config.http_port:
        raise BadConfig(f"agent_port and http_port are both {config.agent_port}; give them different ones")
    if not 0 < config.heartbeat_s < config.policy.lease_s:
        raise BadConfig(
            f"heartbeat_s ({config.heartbeat_s}) must be above 0 and below policy.lease_s ({config.policy.lease_s})"
        )
    token = read_token(config)
    run_dir = Path(config.run_dir)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PreflightFailed(f"cannot make the run directory {run_dir}: {error.strerror}") from error
    with sole_controller(run_dir):
        uvloop.run(serve(config, run_dir, token))


def read_token(config: ControllerConfig) -> str:
    if not config.token_file:
        if is_loopback(config.host):
            return ""
        raise PreflightFailed(
            f"host {config.host} can be reached from other machines, so a token is needed: "
            "make one with 'keepstep token new FILE' and name it in token_file (--token-file FILE)"
        )
    try:
        with Path(config.token_file).open("rb") as file:
            token = file.read(TOKEN_LIMIT).decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise PreflightFailed(f"cannot read the token file {config.token_file}: {error}") from error
    if not token:
        raise PreflightFailed(f"the token file {config.token_file} is empty: 'keepstep token new FILE' makes one")
    return token


def _say(why: str, code: int) -> int:
    print(f"error: {why}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # a thread stuck in a system call on a dead disk must not keep us
