"""An HTTP server before a real one, that changes what the real one answers."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

__all__ = ["proxy"]


@contextmanager
def proxy(
    port: int,
    edit: Callable[[dict[str, Any]], None] | None = None,
    *,
    swallow: Callable[[str], bool] = lambda path: False,
) -> Iterator[str]:
    """The address of a proxy of 127.0.0.1:`port`.

    `edit` changes the answers to `/generate`. Requests that `swallow` is true of go no further, and
    are answered with success.
    """

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _pass_on(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if swallow(self.path):
                self._answer(200, "application/json", b'{"success": true, "message": "lost"}')
                return
            upstream = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
            headers = {"Content-Type": self.headers.get("Content-Type", "")}
            upstream.request(self.command, self.path, body or None, headers)
            answer = upstream.getresponse()
            raw = answer.read()
            if edit is not None and self.path == "/generate":
                changed = json.loads(raw)
                edit(changed)
                raw = json.dumps(changed).encode()
            self._answer(answer.status, answer.getheader("Content-Type", ""), raw)
            upstream.close()

        def _answer(self, status: int, kind: str, raw: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        do_GET = do_POST = _pass_on

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
