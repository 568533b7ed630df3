"""A real model in SGLang on CUDA: what tests/sglang shows on the CPU, and what only a GPU can show.

Not run yet: it needs a GPU, SGLang in the environment of SGLANG_PYTHON, and a model folder in
LEDGER_GPU_MODEL (a dense or mixture model that SGLang and this project know, in bfloat16).
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from rollout.engines.sglang.pool import SGLangPool  # noqa: E402
from rollout.event_loop import EventLoopThread  # noqa: E402
from rollout.protocol import GenerationRequest, GenerationResult, SamplingParams  # noqa: E402
from tests.sglang.servers import option_words, pool_of  # noqa: E402
from tests.sglang.training import checked, command, rows  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SERVER = ("--enable-deterministic-inference", "--mem-fraction-static", "0.4")
PARAMS = SamplingParams(max_new_tokens=64)
Engine = tuple[SGLangPool, EventLoopThread, Path]


def _setting(name: str, what: str) -> str:
    if name not in os.environ:
        pytest.fail(f"set {name} to {what}")
    return os.environ[name]


@pytest.fixture(scope="module")
def model() -> Path:
    return Path(_setting("LEDGER_GPU_MODEL", "a model folder"))


@pytest.fixture(scope="module")
def python() -> str:
    return _setting("SGLANG_PYTHON", "the interpreter of an environment with SGLang on CUDA")


@pytest.fixture(scope="module")
def engine(python: str, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    loop = EventLoopThread("gpu engine")
    logs = tmp_path_factory.mktemp("sglang")
    words = ("--dtype", "bfloat16", *SERVER)
    pool = pool_of(python, model, logs, *words, devices=None)
    try:
        loop.call(pool.start())
        yield pool, loop, model
    finally:
        loop.call(pool.close())
        loop.close()


def ask(engine: Engine, requests: Sequence[GenerationRequest]) -> list[GenerationResult]:
    pool, loop, _ = engine

    async def asking() -> list[GenerationResult]:
        return await asyncio.gather(*(pool.generate(one, PARAMS) for one in requests))

    return loop.call(asking())


def request(model: Path, number: int, name: str) -> GenerationRequest:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    text = f"Write the number {number} as a word, then tell a short story about it.\n"
    tokens = np.array(tokenizer(text)["input_ids"], dtype=np.int32)
    return GenerationRequest(
        index=number, tokens=tokens, seed=number, request_id=f"{name}.{number}"
    )


def test_batch_and_cache_do_not_change_a_bit(engine: Engine) -> None:
    """With --enable-deterministic-inference on CUDA; on the CPU it does not hold."""
    model = engine[2]
    (alone,) = ask(engine, [request(model, 3, "alone")])
    among = ask(engine, [request(model, i, "among") for i in range(16)])[3]
    assert among.tokens.tolist() == alone.tokens.tolist()
    assert among.log_probs.tobytes() == alone.log_probs.tobytes()
    if alone.expert_ids is not None:
        assert among.expert_ids is not None
        assert (alone.expert_ids == among.expert_ids).all()


def test_log_probs_are_near_those_of_transformers(engine: Engine) -> None:
    """Kernels and order of sums differ in bfloat16: some 1e-2 of a natural log-prob a token."""
    from transformers import AutoModelForCausalLM

    folder = engine[2]
    asked = [request(folder, i, "near") for i in range(4)]
    found = ask(engine, asked)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, local_files_only=True
    ).cuda()
    differences = []
    for one, answer in zip(asked, found, strict=True):
        whole = np.concatenate([one.tokens, answer.tokens]).astype(np.int64)
        with torch.no_grad():
            logits = model(torch.from_numpy(whole)[None].cuda()).logits[0].float()
        expected = torch.log_softmax(logits[len(one.tokens) - 1 : -1], dim=-1).cpu().numpy()
        chosen = expected[np.arange(len(answer.tokens)), answer.tokens]
        differences.append(np.abs(chosen - answer.log_probs))
    together = np.concatenate(differences)
    print(f"log-prob difference: mean {together.mean():.3g}, largest {together.max():.3g}")
    assert together.mean() < 3e-2


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_training_is_replayed_bit_for_bit(
    mode: str, model: Path, python: str, tmp_path: Path
) -> None:
    """Engine and trainer share the GPU; partial rollouts take updates in the middle of requests."""
    words = command(
        tmp_path / "ledger",
        model,
        bf16=True,
        partial_rollout=True,
        over_sampling_batch_size=4,
        rollout_stop_token_ids=[],
        pause_generation_mode=mode,
        rollout_engine_python=python,
        rollout_engine_log_dir=str(tmp_path / "logs"),
    )
    done = subprocess.run([*words, *option_words(SERVER)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["weight_version"] == 3
    with checked(tmp_path / "ledger") as ledger:
        loaded = rows(ledger, "select weight_version, transport from weights_loaded")
        assert {one["weight_version"] for one in loaded} == {0, 1, 2, 3}
