"""Steps with routing replay in any layout: what every router did, and what was recorded."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.trainer.memory import MemoryReader, prompt, routing, score, segment
from tests.trainer.tiny_policy import config
from trainer.megatron import unwrap
from trainer.model import build_model
from trainer.routing_replay import routers
from trainer.settings import AlgorithmSettings, BatchSettings, OptimizerSettings, ParallelSettings
from trainer.state import create_state
from trainer.stepping import PlannedStep, take_rollout
from trainer.weights import export_weights, write_safetensors

LAYERS, EXPERTS, TOP_K = 3, 4, 2
"""Layers with experts: the first of four layers is dense."""
ROWS = [[1, 2, 3, 7, 8, 9], [1, 2, 3, 4], [5, 6, 7, 8, 9, 30, 11, 12], [5, 6, 7, 13, 14]]
SIZES = BatchSettings(
    rollout_batch_size=2,
    n_samples_per_prompt=2,
    global_batch_size=4,
    num_steps_per_rollout=1,
    micro_batch_size=1,
    seq_length=12,
)


def make_folder(folder: Path) -> Path:
    """Weights of a model whose layers every layout can divide."""
    made = config(moe=True) | {
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "mlp_only_layers": [0],
    }
    model = build_model(made, ParallelSettings(), trainable=False)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    folder.mkdir(parents=True, exist_ok=True)
    write_safetensors(folder, export_weights(model), made)
    return folder


def choices() -> list[np.ndarray]:
    """Of each sample any two experts a token and layer."""
    generator = np.random.default_rng(5)
    every = [np.tile(np.arange(EXPERTS), (len(row) - 1, LAYERS, 1)) for row in ROWS]
    return [generator.permuted(one, axis=-1)[..., :TOP_K].astype(np.uint8) for one in every]


def events() -> list[Any]:
    """Four samples in two groups, and the engine's routing of them."""
    made: list[Any] = [prompt([0, 1], [1, 2, 3], group=0), prompt([2, 3], [5, 6, 7], group=1)]
    for index, (row, ids) in enumerate(zip(ROWS, choices(), strict=True)):
        made += [segment(index, row[3:]), score(index, float(index % 3 == 0))]
        made.append(routing(index, ids, num_experts=EXPERTS))
    return made


def take_step(
    folder: Path, parallel: ParallelSettings, algorithm: dict[str, Any]
) -> dict[str, Any]:
    """One step from `folder`: its result, and the experts of each call of each router.

    Calls with a gradient are recomputations where activations are recomputed, and forwards
    elsewhere; those of scoring are left out.
    """
    state = create_state(folder, parallel, OptimizerSettings(lr=1e-2), seed=1)
    calls: dict[tuple[int, bool], list[list[list[int]]]] = defaultdict(list)
    scoring = [algorithm.get("routing_replay") == "old_policy"]
    for chunk in state.chunks:
        for guide, router in zip(routers(chunk), _router_modules(chunk), strict=True):

            def keep(_m: Any, _i: Any, out: Any, layer: int = guide.moe_layer) -> None:
                chosen = [sorted(row.nonzero()[:, 0].tolist()) for row in out[1]]
                calls[layer, torch.is_grad_enabled()].append(chosen)

            router.register_forward_hook(keep)
    reader: Any = MemoryReader(events())
    plan = PlannedStep(
        step=0,
        rollout_step=0,
        step_in_rollout=0,
        weight_version_in=0,
        weight_version_out=1,
        indices=np.arange(4),
    )
    steps = take_rollout(state, reader, [plan], AlgorithmSettings(**algorithm), SIZES)
    ((_, batch, result),) = list(steps)
    return {
        "calls": dict(calls),
        "scored": scoring[0],
        "expert_ids": [ids.tolist() for ids in batch.expert_ids or ()],
        "result": result,
        "micro_batches": np.flatnonzero(
            result.step_committed.micro_batch_ranks == _data_rank()
        ).tolist(),
    }


def _data_rank() -> int:
    from trainer.ranks import data_parallel_rank

    return data_parallel_rank()


def _router_modules(chunk: Any) -> list[Any]:
    layers = unwrap(chunk).decoder.layers
    return [layer.mlp.router for layer in layers if hasattr(layer.mlp, "router")]
