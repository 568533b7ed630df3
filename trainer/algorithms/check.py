"""Whether the names in the settings stand for something, before anything is run with them."""

from __future__ import annotations

from ledger.errors import InvalidArgument, explain
from trainer.algorithms.advantages import ESTIMATORS
from trainer.algorithms.correction_names import correction_name
from trainer.algorithms.corrections import CORRECTIONS
from trainer.algorithms.losses import POLICY_LOSSES
from trainer.algorithms.registry import resolve
from trainer.settings import AlgorithmSettings

__all__ = ["WITHOUT_KL", "check_algorithm"]

WITHOUT_KL = frozenset({"gdpo", "maxrl", "on_policy_distillation"})
"""Estimators that do not look at the KL of a reward."""


def check_algorithm(settings: AlgorithmSettings) -> None:
    """Raises InvalidArgument for an unknown estimator, loss or correction, listing the known.

    Also where an estimator would leave out, without a word, what the settings ask for.
    """
    name = settings.advantage_estimator
    resolve(ESTIMATORS, name, setting="--advantage-estimator")
    if name in WITHOUT_KL and settings.kl_coef != 0:
        raise _contradiction(
            f"--advantage-estimator {name} with --kl-coef {settings.kl_coef}",
            "--kl-coef 0: this estimator has no place for a KL in the reward",
            "put the KL into the loss with --use-kl-loss and --kl-loss-coef",
        )
    if name == "on_policy_distillation" and settings.use_opd:
        raise _contradiction(
            f"--advantage-estimator {name} with --use-opd",
            "one of them: the teacher's term would be added to itself",
            "weigh it with --opd-kl-coef",
        )
    resolve(POLICY_LOSSES, settings.policy_loss, setting="--policy-loss")
    if settings.use_tis:
        name = correction_name(settings.custom_tis_function_path)
        resolve(CORRECTIONS, name, setting="--custom-tis-function-path")


def _contradiction(on: str, expected: str, do: str) -> InvalidArgument:
    return InvalidArgument(
        explain("checking the algorithm", on=on, expected=expected, found="both", do=do)
    )
