"""Weight updates of an SGLang engine on CUDA: every way, compared by the checksums of its kernel.

Not run yet: it needs a GPU, SGLang in the environment of SGLANG_PYTHON, and a model folder in
LEDGER_GPU_MODEL (a dense or mixture model that SGLang and this project know, in bfloat16).
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from safetensors.torch import safe_open  # noqa: E402

from rollout.weights import EngineControl, WeightUpdater, WeightUpdateSettings  # noqa: E402
from tests.sglang.servers import Server  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module")
def model() -> Path:
    if "LEDGER_GPU_MODEL" not in os.environ:
        pytest.fail("set LEDGER_GPU_MODEL to a model folder")
    return Path(os.environ["LEDGER_GPU_MODEL"])


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if "SGLANG_PYTHON" not in os.environ:
        pytest.fail("set SGLANG_PYTHON to the interpreter of an environment with SGLang on CUDA")
    log = tmp_path_factory.mktemp("sglang") / "log"
    arguments = ("--enable-memory-saver", "--mem-fraction-static", "0.6")
    server = Server(os.environ["SGLANG_PYTHON"], model, log, *arguments)
    try:
        yield server.wait()
    finally:
        server.kill()


def weights_of(model: Path) -> dict[str, Any]:
    found = {}
    for path in sorted(model.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    if json.loads((model / "config.json").read_text()).get("tie_word_embeddings"):
        found.pop("lm_head.weight", None)
    return found


@pytest.mark.parametrize("colocated", [False, True])
@pytest.mark.parametrize("transport", ["disk", "tensor", "distributed", "checkpoint_engine"])
def test_an_engine_holds_what_was_published(
    server: Server, model: Path, transport: str, colocated: bool
) -> None:
    first = weights_of(model)
    second = {name: tensor * 1.5 for name, tensor in first.items()}

    async def main() -> None:
        control = EngineControl(server.address, local=True)
        settings = WeightUpdateSettings(transport=transport, mode="delta")
        updater = WeightUpdater(settings, json.loads((model / "config.json").read_text()))
        try:
            changed = {**second, "model.norm.weight": first["model.norm.weight"]}
            for version, weights in ((1, first), (2, second), (3, changed)):
                if colocated and version == 2:
                    await updater.sleep([control])
                await updater.update([control], version, weights.items())
                [event] = updater.loaded()
                assert "mixed words" in event.compared
                await updater.release(version)
            assert (event.base_version, event.sent_tensors) == (2, 1)
        finally:
            await updater.close()
            await control.close()

    asyncio.run(main())
