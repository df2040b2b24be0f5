"""A loopback double of S3: enough of its HTTP for a tier, and the moods of the real one on request."""

from __future__ import annotations

import hashlib
import re
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape


class Store:
    """Objects by ``bucket/key``, uploads under way, and answers to give before behaving."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.uploads: dict[str, dict[int, bytes]] = {}
        self.moods: deque[tuple[int, str]] = deque()
        """Status and S3 error code for the next requests, one each."""
        self.always: tuple[int, str] | None = None
        """The same for every request."""
        self.asleep: threading.Event | None = None
        """While there is one, no request is answered until it is set."""
        self.cut: deque[int] = deque()
        """The next answers with a body end after so many bytes of it, and the connection with them."""
        self.trickle: tuple[int, float] | None = None
        """Bodies go out in pieces of so many bytes, with so many seconds between them."""
        self.page = 1000
        """Names in one answer to a list, as S3 has it."""
        self.requests: list[str] = []
        self.lock = threading.Lock()


@contextmanager
def serve() -> Iterator[tuple[Store, str]]:
    """The store, and its endpoint."""
    store = Store()
    server = _Server(("127.0.0.1", 0), type("Bound", (_Handler,), {"store": store}))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield store, f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        """A client that gives up in the middle is part of the tests."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    store: Store

    def log_message(self, *args: object) -> None:
        return

    def _go(self) -> None:
        parts = urlsplit(self.path)
        self.key = unquote(parts.path).lstrip("/")
        self.query = {name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
        self.body = self.rfile.read(int(self.headers.get("content-length") or 0))
        with self.store.lock:
            self.store.requests.append(f"{self.command} {self.key}")
            mood = self.store.always or (self.store.moods.popleft() if self.store.moods else None)
        if self.store.asleep is not None:
            self.store.asleep.wait(30)
        if mood is not None:
            code = f"<?xml version='1.0'?><Error><Code>{mood[1]}</Code><Message>{mood[1]}</Message></Error>"
            self._answer(mood[0], code.encode())
            return
        with self.store.lock:
            getattr(self, f"_{self.command.lower()}")()

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _go

    def _put(self) -> None:
        if "uploadId" in self.query:
            self.store.uploads[self.query["uploadId"]][int(self.query["partNumber"])] = self.body
        else:
            self.store.objects[self.key] = self.body
        self._answer(200, b"", etag=self.body)

    def _post(self) -> None:
        if "uploads" in self.query:
            name = f"upload{len(self.store.requests)}"
            self.store.uploads[name] = {}
            self._answer(
                200,
                f"<InitiateMultipartUploadResult><UploadId>{name}</UploadId></InitiateMultipartUploadResult>".encode(),
            )
        elif "uploadId" in self.query:
            pieces = self.store.uploads.pop(self.query["uploadId"])
            self.store.objects[self.key] = b"".join(pieces[number] for number in sorted(pieces))
            self._answer(200, b"<CompleteMultipartUploadResult><ETag>x</ETag></CompleteMultipartUploadResult>")
        elif "delete" in self.query:
            bucket = self.key.split("/", 1)[0]
            keys = [key.decode() for key in re.findall(rb"<Key>(.*?)</Key>", self.body)]
            for key in keys:
                self.store.objects.pop(f"{bucket}/{key}", None)
            rows = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys)
            self._answer(200, f"<DeleteResult>{rows}</DeleteResult>".encode())
        else:
            self._answer(400, b"")

    def _delete(self) -> None:
        if "uploadId" in self.query:
            self.store.uploads.pop(self.query["uploadId"], None)
        else:
            self.store.objects.pop(self.key, None)
        self._answer(204, b"")

    def _head(self) -> None:
        self._get()

    def _get(self) -> None:
        if "list-type" in self.query:
            self._list()
            return
        data = self.store.objects.get(self.key)
        if data is None:
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
            return
        span = re.match(r"bytes=(\d+)-(\d*)", self.headers.get("range") or "")
        if span is None:
            self._answer(200, data, etag=data)
            return
        start, end = int(span[1]), int(span[2] or len(data) - 1) + 1
        if start >= len(data):
            self._answer(416, b"<Error><Code>InvalidRange</Code></Error>")
            return
        piece = data[start:end]
        self._answer(
            206, piece, etag=data, extra={"Content-Range": f"bytes {start}-{start + len(piece) - 1}/{len(data)}"}
        )

    def _list(self) -> None:
        bucket, prefix = self.key.split("/", 1)[0], self.query.get("prefix", "")
        after = self.query.get("continuation-token", "")
        names = sorted(n for n in self.store.objects if n.startswith(f"{bucket}/{prefix}") and n > after)
        rows = "".join(
            f"<Contents><Key>{escape(name.split('/', 1)[1])}</Key><Size>{len(self.store.objects[name])}</Size>"
            f"<ETag>x</ETag><LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
            for name in names[: self.store.page]
        )
        more = len(names) > self.store.page
        token = f"<NextContinuationToken>{escape(names[self.store.page - 1])}</NextContinuationToken>" if more else ""
        head = f"<IsTruncated>{str(more).lower()}</IsTruncated>{token}"
        self._answer(200, f"<ListBucketResult>{head}{rows}</ListBucketResult>".encode())

    def _answer(self, status: int, body: bytes, *, etag: bytes = b"", extra: dict[str, str] | None = None) -> None:
        self.send_response(status)
        self.send_header("ETag", f'"{hashlib.md5(etag).hexdigest()}"')
        self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        self.send_header("Content-Length", str(len(body)))
        for name, value in (extra or {}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if body and self.store.cut:
            self.wfile.write(body[: self.store.cut.popleft()])
            self.close_connection = True
        elif self.store.trickle is None:
            self.wfile.write(body)
        else:
            size, pause_s = self.store.trickle
            for start in range(0, len(body), size):
                self.wfile.write(body[start : start + size])
                time.sleep(pause_s)
