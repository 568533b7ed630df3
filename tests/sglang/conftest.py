"""Real SGLang servers, one dense and one mixture, started side by side once a session."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sglang.models import make_model
from tests.sglang.servers import ARGUMENTS, MOE_ARGUMENTS, Server

_HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All of this folder is left to `make test-sglang`."""
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker(pytest.mark.sglang)


@pytest.fixture(scope="session")
def sglang_python() -> str:
    """The interpreter of SGLang's own environment: a missing one fails, it is never a skip."""
    python = os.environ.get("SGLANG_PYTHON", str(_HERE.parents[1] / ".venv-sglang/bin/python"))
    if not Path(python).is_file():
        pytest.fail(f"no SGLang at {python}: run these tests with `make test-sglang`")
    return python


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models 'dense-0', 'dense-1', 'moe-0' and 'moe-1': two sets of weights of each kind."""
    base = tmp_path_factory.mktemp("sglang-models")
    return {
        f"{kind}-{seed}": make_model(base / f"{kind}-{seed}", moe=kind == "moe", seed=seed)
        for kind in ("dense", "moe")
        for seed in (0, 1)
    }


@pytest.fixture(scope="session")
def fleet(
    sglang_python: str, folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Server]]:
    """The servers 'dense' and 'moe'. Use the fixtures of these names, which put them in order."""
    logs = tmp_path_factory.mktemp("sglang-logs")
    started = {
        kind: Server(sglang_python, folders[f"{kind}-0"], logs / f"{kind}.log", *arguments)
        for kind, arguments in (("dense", ARGUMENTS), ("moe", MOE_ARGUMENTS))
    }
    try:
        for server in started.values():
            server.wait()
        yield started
    finally:
        for server in started.values():
            server.kill()


def _in_order(server: Server, model: Path) -> Server:
    """Serving, with the first weights as version 0, whatever the test before left."""
    if not server.is_alive:
        pytest.fail(f"a test before this one ended the server:\n{server.tail()}")
    server.call("/continue_generation", {})
    if server.call("/model_info")["weight_version"] != "0":
        server.load(model, 0)
    return server


@pytest.fixture
def dense(fleet: dict[str, Server], folders: dict[str, Path]) -> Server:
    return _in_order(fleet["dense"], folders["dense-0"])


@pytest.fixture
def moe(fleet: dict[str, Server], folders: dict[str, Path]) -> Server:
    return _in_order(fleet["moe"], folders["moe-0"])
