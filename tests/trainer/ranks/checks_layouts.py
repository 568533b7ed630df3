"""Whole steps of a tiny policy in any layout, and what they recorded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.trainer.memory import MemoryReader, prompt, routing, score, segment
from tests.trainer.tiny_policy import config
from trainer.batch import Batch, load_batch
from trainer.forward import log_probs_at, micro_output
from trainer.microbatch import cut
from trainer.partition import partition_for, terms_of
from trainer.ranks import data_parallel_rank, data_parallel_size, is_writer
from trainer.schedule import run_schedule
from trainer.scoring import score_policy
from trainer.settings import AlgorithmSettings, BatchSettings, OptimizerSettings, ParallelSettings
from trainer.state import MAIN, MOMENTS, create_state
from trainer.step import run_step
from trainer.weights import write_safetensors

LAYERS, EXPERTS, TOPK, VOCAB = 4, 4, 2, 33
ROWS = [[1, 2, 3, 7, 8, 9], [1, 2, 3, 4], [5, 6, 7, 8, 9, 30, 11, 12], [5, 6, 7, 13, 14]]
SIZES = BatchSettings(
    rollout_batch_size=2,
    n_samples_per_prompt=2,
    global_batch_size=4,
    num_steps_per_rollout=1,
    micro_batch_size=1,
    seq_length=11,
)


def make_folder(folder: Path, *, moe: bool, tied: bool = False) -> Path:
    """A model that every layout can divide: 4 layers, 2 groups of heads, 33 words."""
    made = config(moe=moe) | {
        "vocab_size": VOCAB,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": tied,
    }
    import transformers

    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**made), attn_implementation="eager"
    )
    named = {name: tensor.detach() for name, tensor in model.float().named_parameters()}
    generator = torch.Generator().manual_seed(3)
    for name, tensor in named.items():
        if "norm" in name:
            tensor.uniform_(0.5, 1.5, generator=generator)
        else:
            tensor.normal_(0, 0.2, generator=generator)
    if tied:
        named.pop("lm_head.weight", None)
    folder.mkdir(parents=True, exist_ok=True)
    write_safetensors(folder, _one_by_one(named), made)
    return folder


def _one_by_one(named: dict[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    """transformers keeps all experts of a layer in one tensor; canonical files do not."""
    out = []
    for name, tensor in named.items():
        if name.endswith("experts.gate_up_proj"):
            for number, one in enumerate(tensor):
                gate, up = one.chunk(2)
                stem = name.removesuffix("gate_up_proj")
                out.append((f"{stem}{number}.gate_proj.weight", gate))
                out.append((f"{stem}{number}.up_proj.weight", up))
        elif name.endswith("experts.down_proj"):
            stem = name.removesuffix("down_proj")
            out += [(f"{stem}{n}.down_proj.weight", one) for n, one in enumerate(tensor)]
        else:
            out.append((name, tensor))
    return out


def make_batch(*, moe: bool, order: Sequence[int] = range(4)) -> Batch:
    """Four samples in two groups; with experts, routing drawn from a seed."""
    generator = np.random.default_rng(5)
    events: list[Any] = [prompt([0, 1], [1, 2, 3], group=0), prompt([2, 3], [5, 6, 7], group=1)]
    for index, row in enumerate(ROWS):
        log_probs = generator.uniform(-4, -1, len(row) - 3).astype(np.float32)
        events.append(segment(index, row[3:], log_probs))
        if moe:
            chosen = generator.permuted(
                np.tile(np.arange(EXPERTS), (len(row) - 1, LAYERS, 1)), axis=-1
            )
            events.append(routing(index, chosen[..., :TOPK].astype(np.uint8)))
        events.append(score(index, float(index % 3 == 0)))
    return load_batch(MemoryReader(events), order)


def take_steps(
    folder: Path,
    parallel: ParallelSettings,
    optimizer: dict[str, Any],
    algorithm: dict[str, Any],
    n_steps: int = 2,
) -> dict[str, Any]:
    """Steps from `folder`; what each recorded, and the state after the last."""
    state = create_state(folder, parallel, OptimizerSettings(lr=1e-2, **optimizer), seed=1)
    moe = state.model.config.num_moe_experts is not None
    batch = make_batch(moe=moe)
    plan = partition_for(
        batch.prompt_lengths_B + batch.response_lengths_B,
        batch.indices_B,
        SIZES,
        terms_of(parallel, data_parallel_size=data_parallel_size()),
    )
    settings = AlgorithmSettings(**algorithm)
    scored = score_policy(state, batch, plan)
    results = []
    for step in range(n_steps):
        result = run_step(
            state,
            batch,
            plan,
            settings,
            SIZES,
            step=step,
            rollout_step=step,
            step_in_rollout=0,
            weight_version_in=step,
            weight_version_out=step + 1,
        )
        results.append(result)
    weights = {name: tensor.float().numpy().copy() for name, tensor in state.export_weights()}
    moments = {name: tensor.numpy().copy() for name, tensor in state.moments()}
    return {
        "scored": scored,
        "results": results,
        "weights": weights if is_writer() else None,
        "moments": moments if is_writer() else None,
        "records": state.tensor_records(),
        "moment_records": state.moment_records(),
    }


def negative_zeros(folder: Path, parallel: ParallelSettings) -> list[str]:
    """Which moments and main weights lose a −0.0 on the way out of a distributed optimizer."""
    optimizer = OptimizerSettings(lr=1e-2, use_distributed_optimizer=True)
    state = create_state(folder, parallel, optimizer, seed=1)
    whole = {
        f"{kind}.{tensor.name}": torch.full(tensor.shape, -0.0)
        for kind in (*MOMENTS, *((MAIN,) if parallel.bf16 else ()))
        for tensor in state.placement.tensors
    }
    state.load_moments(whole, step=3)
    lost = [name for name, tensor in state.moments(to=0) if not bool(torch.signbit(tensor).all())]
    return lost if state.adam_step() == 3 else ["the step count"]


def gradients(folder: Path, parallel: ParallelSettings, optimizer: dict[str, Any]) -> list[Any]:
    """Records of the gradients of a first step, taken before the optimizer."""
    state = create_state(folder, parallel, OptimizerSettings(lr=1e-2, **optimizer), seed=1)
    batch = make_batch(moe=False)
    terms = terms_of(parallel, data_parallel_size=data_parallel_size())
    lengths = batch.prompt_lengths_B + batch.response_lengths_B
    plan = partition_for(lengths, batch.indices_B, SIZES, terms)
    micros = cut(batch, plan, plan.of_rank(data_parallel_rank()))
    state.zero_grad()

    def forward_step(source: Any, model: Any) -> Any:
        micro = next(source)
        output = micro_output(model, micro)
        return output, lambda logits: (-log_probs_at(logits, micro)[0].sum(), None)

    run_schedule(forward_step, state.chunks, micros, forward_only=False)
    return state.gradient_records()
