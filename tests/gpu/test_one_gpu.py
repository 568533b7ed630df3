"""The main job on one CUDA device: the same code path, without the CPU shim, over NCCL.

Bits are compared within one device only. Run with `make test-gpu`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.main_job.job import command_line

torch = pytest.importorskip("torch", reason="needs torch")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def _run(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command in a process of its own, as a user starts it."""
    return subprocess.run(
        [sys.executable, "-m", module, *arguments], capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module", params=["dense", "moe"])
def trained(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path, dict[str, Any]]:
    """Ledger, model and result of a small run on the device."""
    model = request.getfixturevalue(f"tiny_{request.param}")
    ledger = tmp_path_factory.mktemp("gpu") / request.param
    done = _run("trainer.cli", *command_line(ledger, model, num_rollout=4))
    assert done.returncode == 0, done.stderr
    return ledger, model, json.loads(done.stdout)


def test_steps_are_reproduced_bit_for_bit(trained: tuple[Path, Path, dict[str, Any]]) -> None:
    done = _run("replay.cli", "verify", "--ledger", str(trained[0]))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 steps from version 0 reproduced bit for bit" in done.stdout


def test_a_second_process_gives_the_same_digest_and_weights(
    trained: tuple[Path, Path, dict[str, Any]], tmp_path: Path
) -> None:
    _, model, result = trained
    done = _run("trainer.cli", *command_line(tmp_path / "again", model, num_rollout=4))
    assert done.returncode == 0, done.stderr
    again = json.loads(done.stdout)
    assert again["weights_root"] == result["weights_root"]
    assert again["content_digest"] == result["content_digest"]


def test_rollout_and_trainer_log_probs_agree(trained: tuple[Path, Path, dict[str, Any]]) -> None:
    """Kernels of the two sides differ on a GPU: float32 rounding, some 1e-5 of a log-prob."""
    from ledger import open_ledger

    with open_ledger(trained[0]) as ledger:
        worst = ledger.reader("run").sql(
            "select max(metric_values[list_position(metric_names, 'logprob_mismatch_max')]) as x "
            "from step_committed"
        )["x"][0]
    print(f"largest log-prob mismatch on the device: {worst.as_py():.3g}")
    assert worst.as_py() < 1e-3


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_logits_agree_with_transformers_on_the_device(
    kind: str, request: pytest.FixtureRequest
) -> None:
    """Both in float32 without TF32, same weights, same tokens."""
    from transformers import AutoModelForCausalLM

    from trainer.forward import logits_of
    from trainer.model import build_model, read_config
    from trainer.parallel import initialize
    from trainer.settings import ParallelSettings
    from trainer.state import load_weights

    folder = request.getfixturevalue(f"tiny_{kind}")
    initialize(ParallelSettings(), seed=0, num_threads=1, deterministic=True)
    model = build_model(read_config(folder), ParallelSettings(), trainable=False)
    load_weights(model, folder)
    other = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    ).cuda()
    tokens = torch.randint(3, 40, (4, 24), device="cuda")
    with torch.no_grad():
        difference = (logits_of(model, tokens) - other(tokens).logits).abs().max().item()
    print(f"largest logit difference on the device, {kind}: {difference:.3g}")
    assert difference < 1e-4
