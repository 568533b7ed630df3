"""An S3 server (moto) in a process of its own, on a port of its own, for one test session.

It answers one request at a time: a threaded moto lets two exclusive creates of one object succeed.
In front of it stands a layer that tests can ask to answer as S3 does on a bad day, and that
remembers what was asked. The server ends with the process that started it, however that ends.

    python -m tests.servers.s3      prints its port, then serves until its standard input closes
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import os
import re
import secrets
import select
import subprocess
import sys
import tempfile
import threading
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

START_TIMEOUT_S = 60.0
_CONTROL = "/-control/"


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
    """One request that the server got."""

    method: str
    path: str
    """/bucket/key"""
    query: str


@dataclasses.dataclass(frozen=True, slots=True)
class S3Server:
    """A running server, as the tests see it."""

    endpoint: str
    """http://127.0.0.1:PORT"""

    @property
    def storage_options(self) -> dict[str, Any]:
        """What fsspec is given to reach it."""
        return {"key": "testing", "secret": "testing", "endpoint_url": self.endpoint}

    @property
    def environment(self) -> dict[str, str]:
        """What a process is given to reach it, as users of AWS know it."""
        return {
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def bucket(self) -> str:
        """Make an empty bucket; its name."""
        name = f"test-{secrets.token_hex(6)}"
        self._ask("PUT", f"/{name}")
        return name

    def fail(
        self,
        method: str,
        key: str,
        *,
        status: int,
        code: str = "InternalError",
        query: str = "",
        times: int = 1,
        done: bool = False,
    ) -> None:
        """Answer with an error the next `times` requests of `method` whose path has `key` in it.

        `query` must be part of the query; `done` lets the request have its effect first, as when
        an acknowledgement is lost.
        """
        fault = {"method": method, "key": key, "query": query, "status": status, "code": code}
        self._ask("PUT", _CONTROL + "faults", json.dumps(fault | {"times": times, "done": done}))

    def age(self, path: str) -> None:
        """Make the object at bucket/key one day older."""
        self._ask("PUT", _CONTROL + "age/" + urllib.parse.quote(path))

    def forget_conditions(self, bucket: str) -> None:
        """From now on overwrite objects in a bucket, as services do that know no conditions."""
        self._ask("PUT", _CONTROL + "forget/" + bucket)

    def asked(self, bucket: str) -> list[Asked]:
        """What was asked about a bucket since the last call of this, in order."""
        answer = json.loads(self._ask("GET", f"{_CONTROL}asked/{bucket}"))
        return [Asked(**one) for one in answer]

    def _ask(self, method: str, path: str, body: str = "") -> bytes:
        request = urllib.request.Request(self.endpoint + path, body.encode() or None, method=method)
        with urllib.request.urlopen(request, timeout=START_TIMEOUT_S) as answer:
            data: bytes = answer.read()
        return data


@contextlib.contextmanager
def s3_server() -> Iterator[S3Server]:
    """Start a server; end it afterwards.

    Raises:
        RuntimeError: it did not start; the message holds what it said.
    """
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.servers.s3"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            cwd=Path(__file__).parents[2],
            # S3 takes no part below 5 MiB but the last, which tests have no time to send.
            env=os.environ | {"S3_UPLOAD_PART_MIN_SIZE": "1"},
        )
        try:
            yield S3Server(f"http://127.0.0.1:{_port(process, log)}")
        finally:
            process.kill()
            process.communicate()


def _port(process: subprocess.Popen[bytes], log: Any) -> int:
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], START_TIMEOUT_S)
    line = process.stdout.readline() if ready else b""
    if line.strip().isdigit():
        return int(line)
    log.seek(0)
    said = log.read().decode(errors="replace")
    raise RuntimeError(f"the S3 server did not start within {START_TIMEOUT_S} s:\n{said}")


class _InFront:
    """The layer before moto: WSGI in, WSGI out. One request at a time, so without locks."""

    def __init__(self, served: Callable[..., Iterable[bytes]]) -> None:
        self._served = served
        self._faults: list[dict[str, Any]] = []
        self._asked: list[dict[str, str]] = []
        self._unconditional: set[str] = set()

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        if path.startswith(_CONTROL):
            return self._control(path.removeprefix(_CONTROL), environ, start_response)
        query = environ.get("QUERY_STRING", "")
        self._asked.append({"method": method, "path": path, "query": query})
        if path.split("/")[1] in self._unconditional:
            environ.pop("HTTP_IF_NONE_MATCH", None)
        for fault in self._faults:
            if fault["method"] == method and fault["key"] in path and fault["query"] in query:
                fault["times"] -= 1
                self._faults = [f for f in self._faults if f["times"] > 0]
                return self._answer(fault, environ, start_response)
        if method == "GET" and query.startswith("uploads"):
            return self._uploads(environ, start_response)
        return self._served(environ, start_response)

    def _uploads(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        """The list of unfinished uploads. moto says of all that they began in 2010; here: now."""
        begun: list[Any] = []
        body = b"".join(self._served(environ, lambda *answer: begun.append(answer)))
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")
        body = re.sub(rb"(<Initiated>)[^<]*", rb"\g<1>" + now.encode(), body)
        [(status, headers)] = begun
        kept = [(name, value) for name, value in headers if name.lower() != "content-length"]
        start_response(status, [*kept, ("Content-Length", str(len(body)))])
        return [body]

    def _answer(
        self, fault: dict[str, Any], environ: dict[str, Any], start_response: Any
    ) -> Iterable[bytes]:
        if fault["done"]:
            for _ in self._served(environ, lambda *_: None):
                pass
        else:
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        body = f"<Error><Code>{fault['code']}</Code><Message>asked for</Message></Error>".encode()
        if environ["REQUEST_METHOD"] == "HEAD":
            body = b""
        headers = [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))]
        start_response(f"{fault['status']} Asked", headers)
        return [body]

    def _control(self, what: str, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        body = b""
        action, _, on = what.partition("/")
        if action == "faults":
            length = int(environ["CONTENT_LENGTH"])
            self._faults.append(json.loads(environ["wsgi.input"].read(length)))
        elif action == "age":
            _age(on)
        elif action == "forget":
            self._unconditional.add(on)
        else:
            mine = [a for a in self._asked if (a["path"] + "/").startswith(f"/{on}/")]
            self._asked = [a for a in self._asked if a not in mine]
            body = json.dumps(mine).encode()
        start_response("200 OK", [("Content-Length", str(len(body)))])
        return [body]


def _age(path: str) -> None:
    from moto.core import DEFAULT_ACCOUNT_ID
    from moto.s3.models import s3_backends

    bucket, _, key = path.partition("/")
    found: Any = s3_backends[DEFAULT_ACCOUNT_ID]["aws"].get_object(bucket, key)
    found.last_modified -= datetime.timedelta(days=1)


def _serve() -> None:
    from moto.moto_server.werkzeug_app import (
        DomainDispatcherApplication,
        MotoRequestHandler,
        create_backend_app,
    )
    from werkzeug.serving import make_server

    class Handler(MotoRequestHandler):  # type: ignore[misc, valid-type]
        # An answer in two packets else waits 40 ms for the acknowledgement of its first.
        disable_nagle_algorithm = True

    def end_with_parent() -> None:
        sys.stdin.buffer.read()
        os._exit(0)

    threading.Thread(target=end_with_parent, daemon=True).start()
    moto = DomainDispatcherApplication(create_backend_app)
    server = make_server("127.0.0.1", 0, _InFront(moto), threaded=False, request_handler=Handler)
    print(server.server_port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    _serve()
