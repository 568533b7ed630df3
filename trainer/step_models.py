"""Finds the models of a step besides the policy: frozen ones, and the critic a branch begins with.

An option names a folder; the steps record the root of the weights in it. So a folder may move
between two processes, but another model in its place is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ledger.encode import events_of
from ledger.errors import Corrupt, InvalidArgument, LedgerError, NotFound, explain
from ledger.events import BranchForked, RunResumed, RunStarted, TrainingStarted
from ledger.store import Ledger
from trainer.algorithms.needs import needs_teacher, needs_values
from trainer.critic import create_critic
from trainer.frozen import FrozenModel, StepModels, load_frozen
from trainer.history import History
from trainer.model import read_config
from trainer.model_roles import FLAGS, FOLDERS
from trainer.ranks import by_writer
from trainer.reconfigure import reconfigure
from trainer.restore_checkpoint import check_checkpoint
from trainer.settings import AlgorithmSettings, OptimizerSettings, ParallelSettings
from trainer.state import TrainState

__all__ = ["ModelLibrary", "load_named", "model_places"]

_AS_NAMED = "as the options say"


def model_places(
    values: Mapping[str, Any], ledger: Ledger | None = None, run_id: str | None = None
) -> dict[str, list[str]]:
    """Role → folders where the model may be: that of the options first, then those recorded.

    `values` are options by name. With a ledger, those that the run's events recorded are added, the
    latest first.
    """
    recorded: list[tuple[int, Mapping[str, Any]]] = []
    if ledger is not None and run_id is not None:
        reader = ledger.reader(run_id, branch=None)
        for kind in (RunStarted, TrainingStarted, BranchForked, RunResumed):
            table = reader.table(kind.KIND)
            for event, seq in zip(events_of(table, kind), table["seq"].to_pylist(), strict=True):
                recorded.append((seq, json.loads(getattr(event, "places", None) or "{}")))
    recorded.sort(key=lambda pair: -pair[0])
    found = {}
    for role, name in FOLDERS.items():
        folders = [values.get(name), *(places.get(name) for _, places in recorded)]
        found[role] = list(dict.fromkeys(folder for folder in folders if folder))
    return found


def load_named(
    values: Mapping[str, Any],
    algorithm: AlgorithmSettings,
    parallel: ParallelSettings,
    *,
    vocab_size: int,
) -> dict[tuple[str, str | None], FrozenModel]:
    """The frozen models of a new run that have a folder of their own, for `ModelLibrary.loaded`.

    They are loaded before the run's first event, so that a folder that is refused leaves no run
    behind whose settings name it. Raises what `load_frozen` raises.
    """
    places = model_places(values)
    return {
        (role, _AS_NAMED): load_frozen(
            places[role][0], parallel, role=role, flag=FLAGS[role], vocab_size=vocab_size
        )
        for role in _roles(algorithm)
        if places[role]
    }


def _roles(algorithm: AlgorithmSettings) -> list[str]:
    """Which frozen models the steps ask."""
    roles = []
    if algorithm.use_kl_loss or algorithm.kl_coef != 0:
        roles.append("reference")
    if needs_teacher(algorithm):
        roles.append("teacher")
    return roles


@dataclass(slots=True, kw_only=True)
class ModelLibrary:
    """The models that the steps of a run may ask, each loaded once, when it is first asked for."""

    ledger: Ledger
    history: History
    parallel: ParallelSettings
    places: Mapping[str, Sequence[str]]
    """Role → folders where the model may be, the likeliest first."""
    seed: int
    """Of the run: a new critic's value head is drawn from it."""
    loaded: dict[tuple[str, str | None], FrozenModel] = field(default_factory=dict)
    """Those that were loaded so far: `load_named`'s, to begin with."""

    def models_for(
        self, algorithm: AlgorithmSettings, recorded: Mapping[str, str] | None = None
    ) -> StepModels:
        """The frozen models of a step with these settings.

        `recorded` is what a recorded step says of them (role → root), for a step that is run again;
        None for a new step, which takes what the options name. Raises what `load_frozen` raises.
        """
        return StepModels(**{role: self._model(role, recorded) for role in _roles(algorithm)})

    def prepare_critic(
        self, state: TrainState, algorithm: AlgorithmSettings, optimizer: OptimizerSettings | None
    ) -> None:
        """Give `state` a critic where the estimator asks one, and none where it does not.

        A critic that is there stays as it is; only its optimizer follows `optimizer`. A new one has
        the trunk of the folder of --critic-load, or of the run's first version.
        """
        if not needs_values(algorithm) or optimizer is None:
            state.critic = None
            return
        if state.critic is not None:
            reconfigure(state.critic, optimizer)
            return
        named = [folder for folder in self.places["critic"] if Path(folder).is_dir()]
        if self.places["critic"] and not named:
            raise NotFound(
                explain(
                    "making a critic",
                    on=f"--critic-load {self.places['critic'][0]}",
                    expected="the folder of a model",
                    found="no such folder",
                    do="give the folder where it is now",
                )
            )
        folder = Path(named[0]) if named else self.first_folder()
        state.critic = create_critic(
            folder, state.hf_config, self.parallel, optimizer, seed=self.seed
        )

    def first_folder(self) -> Path:
        """The checkpoint of the run's first version, checked: a Hugging Face folder."""
        weights = self.history.weights
        first = min(v for v, event in weights.items() if event.parent_version is None)
        return by_writer(lambda: check_checkpoint(self.ledger, self.history, first))

    def _model(self, role: str, recorded: Mapping[str, str] | None) -> FrozenModel:
        root = None if recorded is None else recorded.get(role)
        key = (role, root if recorded is not None else _AS_NAMED)
        if key not in self.loaded:
            self.loaded[key] = self._load(role, root, replaying=recorded is not None)
        return self.loaded[key]

    def _load(self, role: str, root: str | None, *, replaying: bool) -> FrozenModel:
        first = self.first_folder()
        vocab_size = int(read_config(first)["vocab_size"])
        folders = [] if replaying and root is None else list(self.places[role])
        if not folders and role == "reference" and root is None:
            # The ledger says what it is: no root of its own in the settings of a step.
            made = load_frozen(
                first, self.parallel, role=role, flag="version 0", vocab_size=vocab_size
            )
            return FrozenModel(chunks=made.chunks, root=None)
        if not folders:
            raise InvalidArgument(
                explain(
                    f"loading the {role}",
                    on=FLAGS[role],
                    expected="the folder of a model with the policy's vocabulary",
                    found="nothing",
                )
            )
        problem: LedgerError | None = None
        for folder in folders if replaying else folders[:1]:
            try:
                return load_frozen(
                    folder,
                    self.parallel,
                    role=role,
                    flag=FLAGS[role],
                    vocab_size=vocab_size,
                    expected_root=root,
                )
            except (Corrupt, NotFound) as error:
                problem = problem or error
        raise problem if problem is not None else RuntimeError("no folder was tried")
