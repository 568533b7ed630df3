"""Weight updates of SGLang engines: transports, deltas, the barrier, and the proof that it held."""

from rollout.weights.control import EngineControl
from rollout.weights.settings import WeightUpdateSettings
from rollout.weights.staged import StagedVersion
from rollout.weights.updater import WeightUpdater

__all__ = ["EngineControl", "StagedVersion", "WeightUpdateSettings", "WeightUpdater"]
