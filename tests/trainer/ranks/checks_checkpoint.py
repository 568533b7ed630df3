"""Checks of checkpoints: a state is saved by one layout and restored by another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ledger.weights import weights_root
from trainer.checkpoint import begin_checkpoint, load_checkpoint, save_checkpoint
from trainer.megatron import unwrap
from trainer.settings import OptimizerSettings, ParallelSettings
from trainer.state import TrainState, create_state


def _state(
    folder: Path, layout: ParallelSettings, *, distributed: bool, load: bool = True, seed: int = 1
) -> TrainState:
    settings = OptimizerSettings(lr=1e-3, weight_decay=0.1, use_distributed_optimizer=distributed)
    return create_state(folder, layout, settings, seed=seed, load=load)


def _step(state: TrainState) -> tuple[str, str, float]:
    """An optimizer step by gradients that follow from the weights alone; what came out of it."""
    state.zero_grad()
    with torch.no_grad():
        for chunk in state.chunks:
            for parameter in unwrap(chunk).parameters():
                parameter.main_grad.copy_(parameter.float().sin() + 0.01)
    _, norm, _ = state.optimizer_step()
    return weights_root(state.tensor_records()).hex(), state.optimizer_digest().hex(), norm


def save(
    model: Path, target: Path, layout: ParallelSettings, form: str, distributed: bool = False
) -> dict[str, Any]:
    """Two steps, a checkpoint, a step more."""
    state = _state(model, layout, distributed=distributed)
    for _ in range(2):
        _step(state)
    records = state.tensor_records()
    saved = save_checkpoint(state, target, model_dir=model, form=form)
    return {"saved": saved, "records": records, "next": _step(state)}


def save_in_background(model: Path, target: Path, layout: ParallelSettings) -> dict[str, Any]:
    """As `save`, but the step more is taken while the files are written."""
    state = _state(model, layout, distributed=False)
    for _ in range(2):
        _step(state)
    records = state.tensor_records()
    pending = begin_checkpoint(
        state, target, model_dir=model, form="torch_dist-1", in_background=True
    )
    following = _step(state)
    there = target.exists()
    saved = pending.finish()
    return {"saved": saved, "records": records, "next": following, "there": there}


def abandon(model: Path, target: Path, layout: ParallelSettings) -> list[str]:
    """Begin a checkpoint and give it up; what is left in its folder's parent."""
    state = _state(model, layout, distributed=False)
    _step(state)
    pending = begin_checkpoint(
        state, target, model_dir=model, form="torch_dist-1", in_background=True
    )
    pending.abandon()
    return sorted(path.name for path in target.parent.iterdir())


def restore(
    target: Path, made: dict[str, Any], layout: ParallelSettings, distributed: bool = False
) -> tuple[str, str, float]:
    """The checkpoint, compared with what was recorded of it; and a step more."""
    sharded = made["saved"].format == "torch_dist-1"
    state = _state(target, layout, distributed=distributed, load=not sharded, seed=5)
    load_checkpoint(
        state,
        target,
        expected_records=made["records"],
        expected_files=dict(zip(made["saved"].files, made["saved"].file_hashes, strict=True)),
        expected_optimizer_digest=made["saved"].optimizer_digest,
        expected_random_state_digest=made["saved"].random_state_digest,
    )
    return _step(state)
