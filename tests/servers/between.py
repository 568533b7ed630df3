"""A listener between a client and a database server, that can lose what goes through it."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Literal

__all__ = ["Between", "between"]

_COMMIT = b"COMMIT\x00"


class Between:
    """What the tests ask of the listener."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self.lose: Literal["answer", "commit"] | None = None
        """What becomes of the next COMMIT: 'answer', the server commits and the client never hears
        of it; 'commit', the server never hears of it. The connection ends either way."""
        self.lost = 0
        """How many were lost."""
        self._open: set[socket.socket] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Refuse connections from now on, and end those that are open."""
        self._listening.close()
        for one in list(self._open):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
                server = socket.create_connection(("127.0.0.1", self._to))
            except OSError:
                return
            self._open |= {client, server}
            threading.Thread(target=self._upwards, args=(client, server), daemon=True).start()
            threading.Thread(target=self._downwards, args=(server, client), daemon=True).start()

    def _upwards(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(1 << 16):
                if _COMMIT in data and self.lose is not None:
                    what, self.lose = self.lose, None
                    self.lost += 1
                    if what == "answer":
                        # The way back closes first: what the server says goes nowhere.
                        client.shutdown(socket.SHUT_WR)
                        server.sendall(data)
                    break
                server.sendall(data)
        self._end(client)
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_WR)

    def _downwards(self, server: socket.socket, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(1 << 16):
                client.sendall(data)
        self._end(client)
        self._end(server)

    def _end(self, one: socket.socket) -> None:
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
        one.close()
        self._open.discard(one)


@contextlib.contextmanager
def between(port: int) -> Iterator[Between]:
    """Listen, and hand on to `port` of this machine."""
    made = Between(port)
    try:
        yield made
    finally:
        made.close()
