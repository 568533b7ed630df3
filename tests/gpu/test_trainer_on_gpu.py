"""The step on one CUDA device: packed rows, bf16, deterministic algorithms, TransformerEngine.

Bits are compared within one device only. Run with `make test-gpu`.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

_STEP = """
import json, sys, tempfile
from pathlib import Path
import numpy as np
from tests.trainer.test_packed_step import PACKED, plan
from tests.trainer.test_step import ALGORITHM, NUMBERS, SIZES, make_batch, plan_of
from tests.trainer.tiny_policy import make_folder
from trainer.parallel import initialize, shutdown
from trainer.settings import OptimizerSettings, ParallelSettings
from trainer.state import create_state
from trainer.step import run_step

asked = json.loads(sys.argv[1])
with tempfile.TemporaryDirectory() as folder:
    model = make_folder(Path(folder) / "model")
    shutdown()
    layout = ParallelSettings(bf16=asked["bf16"])
    initialize(layout, seed=1, num_threads=1, deterministic=asked["deterministic"])
    state = create_state(model, layout, OptimizerSettings(lr=1e-2), seed=1)
    if asked["packed"]:
        made, sizes = plan(), PACKED
        batch = make_batch(order=made.order_B)
    else:
        batch, sizes = make_batch(), SIZES
        made = plan_of(batch, sizes)
    result = run_step(state, batch, made, ALGORITHM, sizes, **NUMBERS)
    committed = result.step_committed
    print(json.dumps({
        "loss": committed.loss,
        "grad_norm": committed.grad_norm,
        "entropy": result.metrics["entropy"],
        "root": result.weights.root.hex(),
        "gradients": committed.gradient_digest.hex(),
    }))
"""


def _step(*, packed: bool, bf16: bool = False, deterministic: bool = True) -> dict[str, Any]:
    """One step in a process of its own: layout and determinism are the process's."""
    asked = json.dumps({"packed": packed, "bf16": bf16, "deterministic": deterministic})
    done = subprocess.run(
        [sys.executable, "-c", _STEP, asked], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("bf16", [False, True])
def test_packed_and_padded_take_the_same_step(bf16: bool) -> None:
    """Within float32 rounding; in bf16 within its 8 bits."""
    tolerance = 2e-2 if bf16 else 1e-4
    packed, padded = (_step(packed=one, bf16=bf16) for one in (True, False))
    for name in ("loss", "grad_norm", "entropy"):
        assert packed[name] == pytest.approx(padded[name], rel=tolerance, abs=tolerance)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("bf16", [False, True])
def test_deterministic_steps_repeat_bit_for_bit(packed: bool, bf16: bool) -> None:
    first, second = (_step(packed=packed, bf16=bf16) for _ in range(2))
    assert first == second


def test_bf16_is_near_float32() -> None:
    low, high = (_step(packed=True, bf16=one) for one in (True, False))
    assert low["root"] != high["root"]
    assert low["entropy"] == pytest.approx(high["entropy"], rel=2e-2)


def test_without_determinism_the_step_is_the_same_within_rounding() -> None:
    free, bound = (_step(packed=True, deterministic=one) for one in (False, True))
    assert free["grad_norm"] == pytest.approx(bound["grad_norm"], rel=1e-4)


@pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is None, reason="needs TransformerEngine"
)
def test_transformer_engines_attention_agrees_with_ours_on_packed_rows() -> None:
    """Its thd attention and `CoreAttention` on the same packed queries, keys and values, bf16."""
    from megatron.core.extensions.transformer_engine import TEDotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    from tests.trainer.tiny_policy import start
    from trainer.megatron import TransformerConfig
    from trainer.packed_attention import CoreAttention, packed_sequences

    start()
    config = TransformerConfig(
        num_layers=1,
        hidden_size=256,
        num_attention_heads=4,
        num_query_groups=2,
        kv_channels=64,
        attention_dropout=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
    )
    kinds = [
        kind(
            config=config,
            layer_number=1,
            attn_mask_type=AttnMaskType.padding_causal,
            attention_type="self",
        ).cuda()
        for kind in (CoreAttention, TEDotProductAttention)
    ]
    packed = packed_sequences(torch.tensor([0, 7, 40, 64], dtype=torch.int32, device="cuda"))
    generator = torch.Generator("cuda").manual_seed(0)

    def drawn(heads: int) -> Any:
        shape = (64, heads, 64)
        return torch.randn(shape, device="cuda", generator=generator).bfloat16()

    query, key, value = drawn(4), drawn(2), drawn(2)
    ours, theirs = (
        kind(
            query,
            key,
            value,
            None,
            attn_mask_type=AttnMaskType.padding_causal,
            packed_seq_params=packed,
        ).reshape(64, -1)
        for kind in kinds
    )
    torch.testing.assert_close(ours.float(), theirs.float(), rtol=0, atol=2e-2)


def test_the_benchmark_of_the_device_runs(tmp_path: Any) -> None:
    import dataclasses

    from tests.bench.gpu import CASE, measured

    case = dataclasses.replace(
        CASE,
        samples=8,
        layers=2,
        hidden_size=256,
        heads=2,
        kv_heads=1,
        intermediate_size=512,
        median_response=64,
        longest_response=256,
    )
    found = measured(
        case,
        tmp_path,
        bf16=True,
        deterministic=False,
        attention_backend="auto",
        repetitions=1,
        peak_tflops=1000.0,
    )
    assert 0 < float(found["step_mfu"]) < 1
