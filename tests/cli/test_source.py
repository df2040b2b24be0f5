"""Where answers come from when the controller's address leads nowhere: the log."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from keepstep.cli.errors import ConfigError
from keepstep.cli.source import of_run
from keepstep.store.sqlite import open_log


class Stranger(BaseHTTPRequestHandler):
    """A server of something else."""

    def do_GET(self) -> None:
        self.send_error(404, "what?")

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def port() -> Iterator[int]:
    server = HTTPServer(("127.0.0.1", 0), Stranger)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


def run_of(folder: Path, port: int, token_file: str = "") -> Path:
    open_log(folder / "log.sqlite").close()
    address = {"host": "127.0.0.1", "agent_port": 1, "http_port": port, "pid": 1, "version": "0"}
    (folder / "controller.json").write_text(json.dumps(address | {"token_file": token_file}))
    return folder


def test_a_port_that_somebody_else_has_by_now_is_no_controller(tmp_path: Path, port: int) -> None:
    """Ports are used again after a run; its log can still be read."""
    assert not of_run(run_of(tmp_path, port)).live


def test_a_copied_run_directory_needs_no_token(tmp_path: Path, port: int) -> None:
    """The token stayed where the controller was; one that a person names has to be there."""
    run = run_of(tmp_path, port, token_file=str(tmp_path / "gone"))
    assert not of_run(run).live
    with pytest.raises(ConfigError, match="mine"):
        of_run(run, str(tmp_path / "mine"))
