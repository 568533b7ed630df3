"""Frozen models of a step: the reference of the KL, the teacher of distillation, the old actor.

Each knows the root of its weights. Where the model came from a folder that an option named, a step
records that root among its settings, so that a replay refuses another model.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ledger.errors import Corrupt, InvalidArgument, NotFound, explain
from ledger.weights import weights_root
from trainer.model import build_chunks, read_config
from trainer.settings import ParallelSettings
from trainer.state import TrainState, load_weights, records_on_every_rank
from trainer.weights import export_weights
from trainer.weights.placement import tensors_of

__all__ = ["NO_MODELS", "FrozenModel", "StepModels", "load_frozen", "old_actor_of"]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class FrozenModel:
    """A model that gives log-probs and is not trained."""

    chunks: list[Any]
    """Megatron's modules of this rank, one a pipeline chunk."""
    root: bytes | None
    """Root of its weights by canonical names, as in weights_published; None: not one for the
    record, because the ledger says what it is (the run's first version, an old version)."""

    def copy_from(self, state: TrainState) -> None:
        """Take the weights that `state` has now."""
        with torch.no_grad():
            for mine, theirs in zip(self.chunks, state.chunks, strict=True):
                held = tensors_of(theirs)
                for name, tensor in tensors_of(mine).items():
                    tensor.copy_(held[name])


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class StepModels:
    """The frozen models that a step may ask."""

    reference: FrozenModel | None = None
    teacher: FrozenModel | None = None

    def record(self) -> dict[str, dict[str, str]]:
        """What the step's settings say of them: role → root (hex), where there is one to say."""
        roots = {
            role: model.root.hex()
            for role, model in (("reference", self.reference), ("teacher", self.teacher))
            if model is not None and model.root is not None
        }
        return {"models": roots} if roots else {}


NO_MODELS = StepModels()
"""Of a step that asks none."""


def load_frozen(
    folder: str | Path,
    parallel: ParallelSettings,
    *,
    role: str,
    flag: str,
    vocab_size: int,
    expected_root: str | None = None,
) -> FrozenModel:
    """A frozen model from a Hugging Face folder; its whole weights are hashed.

    `flag` is the option that named the folder; `expected_root` (hex) what a step recorded of it.

    Raises NotFound where there is no model in the folder; InvalidArgument where it has another
    vocabulary than the policy; Corrupt where its weights are not those recorded.
    """
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise NotFound(
            explain(
                f"loading the {role}",
                on=f"{flag} {folder}",
                expected="a folder with config.json and model.safetensors",
                found="no config.json in it" if folder.is_dir() else "no such folder",
                do=f"give the folder where it is now with {flag}",
            )
        )
    config = read_config(folder)
    if config.get("vocab_size") != vocab_size:
        raise InvalidArgument(
            explain(
                f"loading the {role}",
                on=f"{flag} {folder}",
                expected=f"the policy's vocabulary of {vocab_size} tokens",
                found=config.get("vocab_size"),
                do="log-probs of the policy's tokens need the same ids: take a model of its family",
            )
        )
    chunks = build_chunks(config, parallel, trainable=False)
    load_weights(chunks, folder)
    root = weights_root(records_on_every_rank(export_weights(chunks, to="spread")))
    if expected_root is not None and root.hex() != expected_root:
        raise Corrupt(
            explain(
                f"loading the {role}",
                on=f"{flag} {folder}",
                expected=f"weights with root {expected_root}, as the steps recorded",
                found=f"root {root.hex()}",
                do=f"put the model back that the run used, or give its folder with {flag}",
            )
        )
    return FrozenModel(chunks=chunks, root=root)


def old_actor_of(state: TrainState) -> FrozenModel:
    """A copy of the policy as it is now, to be kept while the policy is trained on."""
    chunks = build_chunks(state.hf_config, state.parallel, trainable=False)
    made = FrozenModel(chunks=chunks, root=None)
    made.copy_from(state)
    return made
