"""Real SGLang servers, from `.venv-sglang`: started by the product, or as somebody else would."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollout.engines.sglang.arguments import split_arguments
from rollout.engines.sglang.create import create_sglang_pool
from rollout.engines.sglang.pool import PoolSettings, SGLangPool
from rollout.engines.sglang.settings import SGLangSettings
from rollout.weights import WeightUpdateSettings

__all__ = [
    "ARGUMENTS",
    "MOE_ARGUMENTS",
    "SHARED_ARGUMENTS",
    "START_TIMEOUT_S",
    "Served",
    "Server",
    "free_port",
    "option_words",
    "pool_of",
]

SHARED_ARGUMENTS = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--dtype", "float32", "--max-total-tokens", "16384", "--max-running-requests", "32"),
    *("--chunked-prefill-size", "512", "--enable-deterministic-inference", "--enable-metrics"),
    *("--sleep-on-idle", "--skip-server-warmup", "--random-seed", "0"),
    # A line of the log for each decoded token: tests wait for them.
    *("--decode-log-interval", "1"),
)
ARGUMENTS = (*SHARED_ARGUMENTS, "--disable-overlap-schedule")
"""Of the server of the dense model: it may be paused in place."""
MOE_ARGUMENTS = (*SHARED_ARGUMENTS, "--enable-return-routed-experts")
"""Of that of the mixture: scheduling and sampling overlap, as they do by default."""
START_TIMEOUT_S = 900.0


def free_port() -> int:
    """A TCP port of this host that nobody listens on."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def option_words(arguments: Sequence[str]) -> list[str]:
    """The same arguments as words of this project's command lines."""
    return [f"--sglang-{word[2:]}" if word.startswith("--") else word for word in arguments]


def pool_of(
    python: str,
    model: Path,
    logs: Path,
    *arguments: str,
    engines: int = 1,
    settings: PoolSettings | None = None,
    urls: Sequence[str] = (),
    updates: WeightUpdateSettings | None = None,
    devices: Sequence[str] | None = (),
) -> SGLangPool:
    """The product's pool, not started: of `engines` that it starts, or of those at `urls`.

    By default it looks after nothing: a test may pause or end its engines. `devices`: GPUs that
    they share; None: those that this process sees.
    """
    return create_sglang_pool(
        model,
        SGLangSettings(
            urls=tuple(urls),
            num_gpus=None if urls else engines,
            arguments={} if urls else split_arguments(option_words(arguments), own=())[1],
            python=python,
            environment={"OMP_NUM_THREADS": "1"},
            log_dir=logs,
            ready_timeout_s=START_TIMEOUT_S,
            pool=settings or PoolSettings(health_interval_s=1e6, restarts=0),
        ),
        devices=devices,
        updates=updates,
    )


class Served:
    """A server that runs, and what tests ask it beside the product."""

    def __init__(self, address: str, model: Path, log: Path) -> None:
        self.address, self.model, self.log = address, model, log
        self.port = int(address.rpartition(":")[2])

    def tail(self, lines: int = 40) -> str:
        """The end of what it wrote."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def decoded(self) -> int:
        """Steps in which it has sampled, prefills left out: one token of each running request."""
        return self.log.read_bytes().count(b"Decode batch")

    @property
    def is_alive(self) -> bool:
        """Whether it answers."""
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


class Server(Served):
    """One that the product did not start. Started when made; `wait` for it."""

    def __init__(
        self,
        python: str,
        model: Path,
        log: Path,
        *arguments: str,
        version: int = 0,
        port: int | None = None,
    ) -> None:
        super().__init__(f"http://127.0.0.1:{free_port() if port is None else port}", model, log)
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

    def kill(self) -> None:
        """End it and all its processes at once; returns when they are gone."""
        if self.process.returncode is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
