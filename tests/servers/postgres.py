"""A PostgreSQL server in a temporary folder, for one test session: real, durable, with a password.

It runs as an ordinary user also where the tests run as root, and ends with the process that started
it, however that ends.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

START_TIMEOUT_S = 60.0
USER = "ledger"

# The shell waits for its standard input to close, which it does when our process is gone.
_UNTIL_WE_END = '"$@" & server=$!; cat > /dev/null; kill -QUIT $server; wait $server'


class PostgresServer:
    """A running server, as the tests see it."""

    def __init__(self, binaries: Path, folder: Path, account: dict[str, Any]) -> None:
        self.password = "pw" + secrets.token_hex(12)
        """Of the only user, who may do everything."""
        self.port = 0
        self._binaries = binaries
        self._data = folder / "data"
        self._log = folder / "log"
        self._account = account
        self._shell: subprocess.Popen[bytes] | None = None
        words = folder / "password"
        words.write_text(self.password)
        words.chmod(0o644)
        options = f"-U {USER} --auth=scram-sha-256 -E UTF8 --locale=C --no-sync --no-instructions"
        made = subprocess.run(
            [binaries / "initdb", "-D", self._data, f"--pwfile={words}", *options.split()],
            cwd="/",
            capture_output=True,
            text=True,
            **account,
        )
        if made.returncode:
            raise RuntimeError(f"initdb failed:\n{made.stdout}{made.stderr}")

    def start(self) -> None:
        """Start it, on the port it had before if it had one. Raises: RuntimeError."""
        if not self.port:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                self.port = free.getsockname()[1]
        settings = {
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": "",
            "port": self.port,
            "max_connections": 200,
            "fsync": "on",
            "synchronous_commit": "on",
        }
        command = [str(self._binaries / "postgres"), "-D", str(self._data)]
        for name, value in settings.items():
            command += ["-c", f"{name}={value}"]
        with self._log.open("ab") as log:
            self._shell = subprocess.Popen(
                ["/bin/sh", "-c", _UNTIL_WE_END, "sh", *command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                cwd="/",
                **self._account,
            )
        self._wait_until_ready()

    def stop(self) -> None:
        """End it at once, as a crash would."""
        if self._shell is not None:
            assert self._shell.stdin is not None
            self._shell.stdin.close()
            self._shell.wait(START_TIMEOUT_S)
            self._shell = None

    def url(self, database: str = "postgres") -> str:
        """The address of a database, with the password."""
        return f"postgresql+psycopg://{USER}:{self.password}@127.0.0.1:{self.port}/{database}"

    def schema(self) -> str:
        """Make an empty schema in the common database; an address where it is the only one."""
        name = f"test_{secrets.token_hex(6)}"
        self.execute(f"CREATE SCHEMA {name}")
        return f"{self.url()}?options=-csearch_path%3D{name}"

    def database(self) -> str:
        """Make an empty database; its address. A schema is made ten times faster."""
        name = f"test_{secrets.token_hex(6)}"
        self.execute(f"CREATE DATABASE {name}")
        return self.url(name)

    def execute(self, statement: str, url: str | None = None) -> list[Any]:
        """Run one statement outside of any transaction; its rows."""
        import psycopg

        where = (url or self.url()).replace("+psycopg", "")
        with psycopg.connect(where, autocommit=True, connect_timeout=10) as connection:
            cursor = connection.execute(statement)  # type: ignore[arg-type]
            return cursor.fetchall() if cursor.description else []

    def _wait_until_ready(self) -> None:
        import psycopg

        until = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                self.execute("SELECT 1")
                return
            except psycopg.OperationalError as error:
                if time.monotonic() > until:
                    said = self._log.read_text(errors="replace")
                    raise RuntimeError(f"PostgreSQL did not start:\n{error}\n{said}") from error
            time.sleep(0.05)


def binaries() -> Path:
    """The folder with the server's programs. Raises: RuntimeError, which says how to get it."""
    candidates = [Path(found).resolve().parent for found in [shutil.which("initdb")] if found]
    config = shutil.which("pg_config")
    if config:
        said = subprocess.run([config, "--bindir"], capture_output=True, text=True, check=True)
        candidates.append(Path(said.stdout.strip()))
    installed = Path("/usr/lib/postgresql").glob("*/bin")
    candidates += sorted(installed, key=lambda p: int(p.parent.name), reverse=True)
    for folder in candidates:
        if (folder / "initdb").exists() and (folder / "postgres").exists():
            return folder
    raise RuntimeError(
        "these tests need a PostgreSQL server's programs, and there are none in PATH or "
        "/usr/lib/postgresql: apt-get install postgresql"
    )


@contextlib.contextmanager
def postgres_server() -> Iterator[PostgresServer]:
    """Start a server; end it afterwards, and remove what it stored.

    Raises:
        RuntimeError: it is not installed or did not start; the message holds what it said.
    """
    programs = binaries()
    folder = Path(tempfile.mkdtemp(prefix="ledger-postgres-"))
    try:
        account: dict[str, Any] = {}
        if os.getuid() == 0:  # PostgreSQL refuses to run as root
            user = _ordinary_user()
            os.chown(folder, user.pw_uid, user.pw_gid)
            account = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
        server = PostgresServer(programs, folder, account)
        try:
            server.start()
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _ordinary_user() -> pwd.struct_passwd:
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name)
    raise RuntimeError("there is neither a user postgres nor nobody to run PostgreSQL as")
