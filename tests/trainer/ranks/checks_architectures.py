"""Losses, gradients and exported folders of an architecture in any layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.trainer.megatron_models import random_tokens
from trainer.megatron import get_forward_backward_func
from trainer.ranks import is_last_stage
from trainer.settings import OptimizerSettings, ParallelSettings
from trainer.state import create_state
from trainer.weights import assemble, export_folder

ROWS, WIDTH, LIMIT = 4, 12, 40_000


def learn(folder: Path, layout: ParallelSettings, target: Path | None) -> dict[str, Any]:
    """Forward and backward over four rows; with `target` the weights are exported there.

    "losses" float32 [4, 11] where this rank is a last stage, else None; "gradients" by canonical
    name on rank 0; "written" the names of files.
    """
    state = create_state(folder, layout, OptimizerSettings(lr=1e-3), seed=1)
    losses: list[torch.Tensor] = []

    def forward(tokens: Any, model: Any) -> Any:
        tokens_BT = next(tokens)
        positions = torch.arange(WIDTH).expand(len(tokens_BT), WIDTH)
        out = model(tokens_BT, positions, None, labels=tokens_BT.roll(-1, 1))

        def loss(losses_BT: torch.Tensor) -> Any:
            kept = losses_BT[:, :-1].float()
            losses.append(kept.detach().clone())
            return kept.mean(), {}

        return out, loss

    state.zero_grad()
    get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=iter(random_tokens(ROWS, WIDTH).remainder(96).split(2)),
        model=state.chunks if len(state.chunks) > 1 else state.chunks[0],
        num_microbatches=2,
        seq_length=WIDTH,
        micro_batch_size=2,
        forward_only=False,
    )
    local = state.placement.local
    gradients = {
        name: tensor.clone().numpy()
        for name, tensor in assemble(
            state.placement, lambda key: local[key].main_grad, to=0, dtype=torch.float32
        )
    }
    written = []
    if target is not None:
        written = export_folder(state.chunks, target, state.hf_config, max_shard_size=LIMIT)
    return {
        "losses": torch.cat(losses).numpy() if is_last_stage() else None,
        "gradients": gradients,
        "written": [path.name for path in written],
    }
