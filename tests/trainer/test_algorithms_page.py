"""docs/algorithms.md names every loss, aggregation, correction and metric that there is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.trainer.loss_samples import inputs_of, of_ratios
from trainer.algorithms.correction_metrics import correction_metrics
from trainer.algorithms.corrections import CORRECTIONS
from trainer.algorithms.kl import KL_TYPES
from trainer.algorithms.losses import POLICY_LOSSES
from trainer.settings import AlgorithmSettings
from trainer.settings_conditions import AGGREGATIONS

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "algorithms.md").read_text(encoding="utf-8")


def metrics_of_corrections() -> set[str]:
    inputs = inputs_of([of_ratios([1.0], [1.0])])
    names: set[str] = set()
    for path in CORRECTIONS:
        for mode in ("truncate", "clip", "mask") if path == "mis" else ("truncate",):
            algorithm = AlgorithmSettings(
                use_tis=True,
                custom_tis_function_path=path,
                mis_mode=mode,
                mis_veto_threshold=1e-4 if path == "mis" else None,
                use_opsm=True,
            )
            names |= set(correction_metrics(inputs, algorithm, torch.ones(1)))
    return names


@pytest.mark.parametrize(
    "name", [*sorted(POLICY_LOSSES), *AGGREGATIONS, *KL_TYPES, "icepop", "mis"]
)
def test_every_name_is_on_the_page(name):
    assert f"`{name}`" in PAGE


def test_every_metric_of_the_corrections_is_on_the_page():
    found = metrics_of_corrections()
    assert len(found) > 10
    for name in found:
        short = f"`_{name.rpartition('_')[2]}`"
        assert f"`{name}`" in PAGE or short in PAGE, name
