"""A real SGLang server in a process of its own, from `.venv-sglang`."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["ARGUMENTS", "MOE_ARGUMENTS", "Server", "free_port"]

ARGUMENTS = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--dtype", "float32", "--max-total-tokens", "16384", "--max-running-requests", "32"),
    *("--chunked-prefill-size", "512", "--enable-deterministic-inference", "--enable-metrics"),
    *("--sleep-on-idle", "--skip-server-warmup", "--random-seed", "0"),
    # A line of the log for each decoded token: tests wait for them.
    *("--decode-log-interval", "1"),
)
MOE_ARGUMENTS = (*ARGUMENTS, "--enable-return-routed-experts")
START_TIMEOUT_S = 300.0


def free_port() -> int:
    """A TCP port of this host that nobody listens on."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class Server:
    """Started when made; `wait` for it before the first request."""

    def __init__(
        self,
        python: str,
        model: Path,
        log: Path,
        *arguments: str,
        version: int = 0,
        port: int | None = None,
    ) -> None:
        self.model, self.log = model, log
        self.port = free_port() if port is None else port
        self.address = f"http://127.0.0.1:{self.port}"
        command = [
            *(python, "-m", "sglang.launch_server", "--model-path", str(model)),
            *("--host", "127.0.0.1", "--port", str(self.port), "--weight-version", str(version)),
            *arguments,
        ]
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    def wait(self) -> Server:
        """Return when it serves. Raises RuntimeError with the end of its log where it does not."""
        until = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < until:
            if self.process.poll() is not None:
                break
            try:
                with urllib.request.urlopen(self.address + "/health", timeout=30):
                    return self
            except (urllib.error.URLError, OSError):
                # Nothing outside of a process tells when its port is open.
                time.sleep(0.25)
        self.kill()
        raise RuntimeError(f"SGLang did not start; the end of {self.log}:\n{self.tail()}")

    def tail(self, lines: int = 40) -> str:
        """The end of what it wrote."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def decoded(self) -> int:
        """Steps in which it has sampled, prefills left out: one token of each running request."""
        return self.log.read_bytes().count(b"Decode batch")

    @property
    def is_alive(self) -> bool:
        """Whether its process runs and answers."""
        if self.process.poll() is not None:
            return False
        try:
            return self.call("/model_info") is not None
        except OSError:
            return False

    def call(
        self, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float = 120.0
    ) -> Any:
        """The JSON of an answer. Raises urllib.error.HTTPError for a status that is not 2xx."""
        request = urllib.request.Request(
            self.address + path,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            raw = answer.read()
        try:
            return json.loads(raw)
        except ValueError:
            return raw.decode()

    def load(self, model: Path, version: int) -> None:
        """Take the weights of `model`, under that version; requests that run are waited for."""
        body = {"model_path": str(model), "weight_version": str(version), "flush_cache": True}
        answer = self.call("/update_weights_from_disk", body)
        assert answer["success"], answer

    def kill(self) -> None:
        """End it and all its processes at once; returns when they are gone."""
        if self.process.returncode is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
