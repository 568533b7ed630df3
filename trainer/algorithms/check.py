"""Whether the names in the settings stand for something, before anything is run with them."""

from __future__ import annotations

from trainer.algorithms.advantages import ESTIMATORS
from trainer.algorithms.correction_names import correction_name
from trainer.algorithms.corrections import CORRECTIONS
from trainer.algorithms.losses import POLICY_LOSSES
from trainer.algorithms.registry import resolve
from trainer.settings import AlgorithmSettings

__all__ = ["check_algorithm"]


def check_algorithm(settings: AlgorithmSettings) -> None:
    """Raises InvalidArgument for an unknown estimator, loss or correction, listing the known."""
    resolve(ESTIMATORS, settings.advantage_estimator, setting="--advantage-estimator")
    resolve(POLICY_LOSSES, settings.policy_loss, setting="--policy-loss")
    if settings.use_tis:
        name = correction_name(settings.custom_tis_function_path)
        resolve(CORRECTIONS, name, setting="--custom-tis-function-path")
