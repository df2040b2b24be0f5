"""A small HTTP client for the controller's API: one request per connection, a deadline on each."""

from __future__ import annotations

import http.client
import json
import socket
from typing import Any
from urllib.parse import quote, urlencode

from keepstep.cli.errors import ConfigError, DoorError, NotFound, Unreachable

TIMEOUT_S = 10.0
MAX_ANSWER = 64 << 20
"""Bytes; a longer answer is not read."""


class Api:
    """One controller.

    Args:
        token_file: holds the bearer token; empty where none is needed.
    """

    def __init__(self, host: str, port: int, *, token_file: str = "", timeout_s: float = TIMEOUT_S) -> None:
        self.host, self.port, self.timeout_s = host, port, timeout_s
        self.where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._token_file = token_file

    def get(self, *path: str, timeout_s: float | None = None, **query: object) -> dict[str, Any]:
        """``get("jobs", job, "incidents", limit=5)``.

        Raises:
            Unreachable: nobody answers.
            NotFound: the controller does not know it.
            DoorError: the controller refuses, in its own words.
        """
        words = {key: str(value) for key, value in query.items() if value is not None}
        return self._ask("GET", path, words, None, timeout_s)

    def post(self, *path: str, body: dict[str, Any]) -> dict[str, Any]:
        return self._ask("POST", path, {}, body, None)

    def _ask(
        self,
        verb: str,
        path: tuple[str, ...],
        query: dict[str, str],
        body: dict[str, Any] | None,
        timeout_s: float | None,
    ) -> dict[str, Any]:
        url = "/v1/" + "/".join(quote(part, safe="") for part in path) + (f"?{urlencode(query)}" if query else "")
        data = None if body is None else json.dumps(body).encode()
        line = http.client.HTTPConnection(self.host, self.port, timeout=timeout_s or self.timeout_s)
        try:
            line.request(verb, url, body=data, headers=self._headers(body is not None))
            answer = line.getresponse()
            content = answer.read(MAX_ANSWER)
            status = answer.status
        except (OSError, http.client.HTTPException, socket.gaierror) as error:
            raise Unreachable(
                f"the controller at {self.where} does not answer: {error or type(error).__name__}",
                help="`keepstep jobs` lists what can be read without it",
            ) from error
        finally:
            line.close()
        return self._understood(status, content)

    def _headers(self, has_body: bool) -> dict[str, str]:
        headers = {"Accept": "application/json"}
        if has_body:
            headers["Content-Type"] = "application/json"
        if self._token_file:
            try:
                with open(self._token_file) as file:
                    headers["Authorization"] = f"Bearer {file.read().strip()}"
            except OSError as error:
                raise ConfigError(
                    f"token file {self._token_file} cannot be read: {error.strerror}", help="give --token-file FILE"
                ) from error
        return headers

    def _understood(self, status: int, content: bytes) -> dict[str, Any]:
        try:
            found = json.loads(content)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise Unreachable(
                f"{self.where} answered {status} and no JSON object: is it a keepstep controller's HTTP port?",
                help="the HTTP port is in controller.json and in the controller's first line",
            )
        if status < 400:
            return found
        why = str(found.get("why") or found.get("error") or found.get("detail") or f"status {status}")
        way_out = str(found.get("help") or "")
        if status == 401:
            raise DoorError(
                f"the controller at {self.where} wants a token: {why}", help=way_out or "give --token-file FILE"
            )
        if status == 404:
            raise NotFound(why, help=way_out or "`keepstep jobs` and `keepstep incidents` list what there is")
        raise DoorError(f"the controller at {self.where} refuses: {why}", help=way_out)
