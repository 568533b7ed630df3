"""Real SGLang servers, one dense and one mixture, started side by side once a session."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollout.event_loop import EventLoopThread
from tests.sglang.models import make_model
from tests.sglang.servers import ARGUMENTS, MOE_ARGUMENTS, Served, pool_of

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
) -> Iterator[dict[str, Served]]:
    """The servers 'dense' and 'moe', started by the product. Use the fixtures of these names."""
    logs = tmp_path_factory.mktemp("sglang-logs")
    loop = EventLoopThread("engines")
    pools = {
        kind: pool_of(sglang_python, folders[f"{kind}-0"], logs / kind, *arguments)
        for kind, arguments in (("dense", ARGUMENTS), ("moe", MOE_ARGUMENTS))
    }

    async def start() -> None:
        await asyncio.gather(*(pool.start() for pool in pools.values()))

    async def close() -> None:
        await asyncio.gather(*(pool.close() for pool in pools.values()))

    try:
        loop.call(start())
        yield {
            kind: Served(
                pool.members[0].address, folders[f"{kind}-0"], logs / kind / "engine-0.log"
            )
            for kind, pool in pools.items()
        }
    finally:
        loop.call(close())
        loop.close()


def _in_order(server: Served, model: Path) -> Served:
    """Serving, with the first weights as version 0, whatever the test before left."""
    if not server.is_alive:
        pytest.fail(f"a test before this one ended the server:\n{server.tail()}")
    server.call("/continue_generation", {})
    if server.call("/model_info")["weight_version"] != "0":
        server.load(model, 0)
    return server


@pytest.fixture
def dense(fleet: dict[str, Served], folders: dict[str, Path]) -> Served:
    return _in_order(fleet["dense"], folders["dense-0"])


@pytest.fixture
def moe(fleet: dict[str, Served], folders: dict[str, Path]) -> Served:
    return _in_order(fleet["moe"], folders["moe-0"])
