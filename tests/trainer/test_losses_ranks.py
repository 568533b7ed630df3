"""What losses and corrections take from the whole step is the same on two ranks as on one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.trainer.ranks import checks_losses
from tests.trainer.ranks.pair import Pair
from tests.trainer.tiny_policy import make_folder
from trainer.settings import AlgorithmSettings, ParallelSettings

pytestmark = pytest.mark.xdist_group("ranks")

ALGORITHMS = {
    "mis": AlgorithmSettings(
        policy_loss="gspo",
        use_tis=True,
        custom_tis_function_path="mis",
        mis_level="sequence",
        mis_batch_normalize=True,
        use_opsm=True,
        opsm_delta=0.0,
    ),
    "clip_cov": AlgorithmSettings(
        policy_loss="clip_cov", clip_cov_lb=0.0, clip_cov_ratio=0.3, entropy_coef=0.1
    ),
    "kl_cov": AlgorithmSettings(policy_loss="kl_cov", kl_cov_ratio=0.3),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("dense"))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_two_ranks_and_one(ranks: Pair, folder: Path, name: str) -> None:
    """Gradients are sums of floats in another order: tolerance 1e-5. Weights are equal bit for bit,
    as each sample's forward is the same."""
    alone = checks_losses.take(folder, ALGORITHMS[name])
    first, second = ranks.run(
        checks_losses.take, folder, ALGORITHMS[name], layout=ParallelSettings()
    )
    assert sorted(first["ranks"]) == [0, 0, 1, 1]
    assert first["weights"] == second["weights"]
    assert first["metrics"] == second["metrics"]
    assert first["metrics"] == pytest.approx(alone["metrics"], rel=1e-5, abs=1e-7, nan_ok=True)
    for mine, theirs in zip(alone["correction_weights"], first["correction_weights"], strict=True):
        if name == "mis":
            assert mine.tobytes() == theirs.tobytes()
        else:
            assert mine is theirs is None
    assert np.isfinite(first["loss"])
