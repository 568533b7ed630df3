"""From the engine's routers to the trainer's: what replay takes out of the log-probs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from rollout.engines.transformers_engine import TransformersEngine
from rollout.protocol import GenerationRequest, SamplingParams
from rollout.records import routing_recorded
from tests.trainer.megatron_models import make
from tests.trainer.memory import MemoryReader, prompt, score, segment
from tests.trainer.tiny_policy import make_state
from trainer.batch import load_batch
from trainer.batch_routing import BY_ENGINE, RoutingSource
from trainer.partition import partition_for
from trainer.scoring import score_policy
from trainer.settings import BatchSettings
from trainer.state import TrainState

SAMPLES = 6
SIZES = BatchSettings(
    rollout_batch_size=SAMPLES,
    n_samples_per_prompt=1,
    global_batch_size=SAMPLES,
    num_steps_per_rollout=1,
    micro_batch_size=3,
)
TOLERANCE = 1e-6


def small_logits(kind: str, tmp_path: Path) -> Path:
    """A tiny model with log-probs of a few nats, where float32 rounds far below the tolerance."""
    tiny = make(kind, tmp_path / "made")
    with torch.no_grad():
        tiny.model.lm_head.weight.mul_(0.25)
    tiny.model.save_pretrained(tmp_path / "small")
    return tmp_path / "small"


def sampled_by_engine(folder: Path) -> list[Any]:
    """The events of one response each to different prompts, with routing and gate weights."""
    engine = TransformersEngine(folder, record_expert_weights=True)
    requests = [
        GenerationRequest(index=i, tokens=np.array([5 + i, 6, 7 + 2 * i], np.int32), seed=i)
        for i in range(SAMPLES)
    ]
    events: list[Any] = []
    for asked, found in zip(
        requests,
        engine.generate(requests, SamplingParams(max_new_tokens=12, temperature=0)),
        strict=True,
    ):
        events += [
            prompt([asked.index], asked.tokens, group=asked.index),
            segment(asked.index, found.tokens, found.log_probs, group_index=asked.index),
            score(asked.index, 1.0),
            routing_recorded(found),
        ]
    engine.close()
    return events


def differences(state: TrainState, events: list[Any]) -> dict[str, float]:
    """Largest |trainer − engine| of any sampled token: free, ids replayed, and gate weights too."""
    made = {}
    sources = {"free": None, "ids": BY_ENGINE, "ids and weights": RoutingSource(weights=True)}
    for name, source in sources.items():
        batch = load_batch(MemoryReader(events), range(SAMPLES), routing=source)
        lengths = batch.prompt_lengths_B + batch.response_lengths_B
        plan = partition_for(lengths, batch.indices_B, SIZES)
        found: npt.NDArray[np.float32]
        found = score_policy(state, batch, plan, free_routing=source is None)
        made[name] = float(np.abs(found - batch.rollout_log_probs_N).max())
    return made


def other_routers(state: TrainState) -> None:
    """Routers that choose other experts, and weigh those chosen otherwise."""
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for layer in state.model.decoder.layers:
            if hasattr(layer.mlp, "router"):
                weight = layer.mlp.router.weight
                weight.copy_(torch.randn(weight.shape, generator=generator))


def other_choices(state: TrainState) -> None:
    """Routers that choose other experts by another bias, and weigh any expert as before."""
    generator = torch.Generator().manual_seed(9)
    for layer in state.model.decoder.layers:
        if hasattr(layer.mlp, "router"):
            bias = layer.mlp.router.expert_bias
            bias.copy_(torch.randn(bias.shape, generator=generator))


@pytest.mark.parametrize(
    ("kind", "change", "enough"),
    [
        # Ids alone: the gate weights of other routers are other weights.
        ("qwen3_moe", other_routers, {"ids and weights"}),
        # A dense layer first, a scaling factor of the gate weights, groups of experts.
        ("deepseek_v3", other_routers, {"ids and weights"}),
        # Gate weights are the scores of the chosen without the bias: ids say everything.
        ("glm4_moe", other_choices, {"ids", "ids and weights"}),
    ],
)
def test_replay_takes_a_change_of_the_routers_out_of_the_log_probs(
    tmp_path: Path,
    kind: str,
    change: Callable[[TrainState], None],
    enough: set[str],
) -> None:
    """All other weights are the engine's."""
    folder = small_logits(kind, tmp_path)
    events = sampled_by_engine(folder)
    state = make_state(folder)
    before = differences(state, events)
    change(state)
    after = differences(state, events)
    print(kind, change.__name__, before, after)
    assert max(before.values()) < TOLERANCE
    assert after["free"] > 0.05
    for name in ("ids", "ids and weights"):
        if name in enough:
            assert after[name] < TOLERANCE
        else:
            assert after[name] > 0.05
