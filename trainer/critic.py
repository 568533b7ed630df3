"""The critic: a value for each response token, by a model of its own beside the policy.

Its trunk is a GPTModel of the policy's architecture; in place of the output layer stands one linear
map from the hidden state to a number. It is a `TrainState` like the policy's, with its own
optimizer and schedule, so records, digests and checkpoints of it are made by the same code.

The value at a response token is that of the state *before* the token: it is read where the token
is predicted, so values and log-probs have the same columns. N response tokens of the step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ledger.errors import InvalidArgument, explain
from ledger.seeds import derive_seed
from trainer.megatron import gather_from_sequence_parallel_region, unwrap
from trainer.model import build_chunks, read_config
from trainer.parallel import device
from trainer.settings import OptimizerSettings, ParallelSettings
from trainer.state import TrainState, state_around, widened
from trainer.weights import import_weights, read_safetensors

__all__ = ["ValueHead", "create_critic", "critic_settings", "value_loss"]

HEAD_DEVIATION = 0.02
"""Of the normal distribution that a new value head's weights are drawn from, as in slime."""


class ValueHead(nn.Module):
    """What stands in the place of GPTModel's output layer: hidden [T, B, H] to values [T, B, 1].

    Its tensors are `score.weight` [1, H] and `score.bias` [1], as in Hugging Face's
    `…ForTokenClassification` with one label.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.score = nn.Linear(config.hidden_size, 1, dtype=config.params_dtype)
        self.sequence_parallel = bool(config.sequence_parallel)
        if self.sequence_parallel:
            for parameter in self.parameters():
                # Megatron sums the gradients of such parameters over the ranks of a sequence.
                parameter.sequence_parallel = True  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor, **_: Any) -> tuple[Tensor, None]:
        """As an output layer of Megatron's: (float32 values, no bias to be added)."""
        values = self.score(hidden).float()
        if self.sequence_parallel:
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None


def critic_settings(optimizer: OptimizerSettings, values: Mapping[str, Any]) -> OptimizerSettings:
    """The critic's optimizer: the policy's, with its own learning rate and warm-up.

    `values` are options by name: `critic_lr` (None: as `lr`) and `critic_lr_warmup_iters`.
    """
    lr = values["critic_lr"]
    return replace(
        optimizer,
        lr=optimizer.lr if lr is None else lr,
        min_lr=min(optimizer.min_lr, optimizer.lr if lr is None else lr),
        lr_warmup_iters=values["critic_lr_warmup_iters"],
    )


def create_critic(
    folder: str | Path,
    hf_config: Mapping[str, Any],
    parallel: ParallelSettings,
    optimizer: OptimizerSettings,
    *,
    seed: int,
) -> TrainState:
    """A critic whose trunk is that of the model in `folder`, a policy's or a critic's.

    `hf_config` is the policy's. A folder without `score.weight` gets a head drawn from `seed`: its
    weights from a normal distribution of deviation 0.02, its bias 0. The result is a function of
    the arguments; the process's generators stay as they are.

    Raises InvalidArgument where the folder's model has another shape than the policy, and what
    `read_safetensors` raises.
    """
    # A tied head would share the embedding; the critic has a head of its own.
    trunk = {**hf_config, "tie_word_embeddings": False}
    _same_shape(trunk, {**read_config(folder), "tie_word_embeddings": False}, folder)
    chunks = build_chunks(trunk, parallel, trainable=True)
    for chunk in chunks:
        model = unwrap(chunk)
        if model.post_process:
            model.output_layer = ValueHead(model.config).to(device())
    named = widened(read_safetensors(folder))
    named.pop("lm_head.weight", None)
    if "score.weight" not in named:
        named |= new_head(int(trunk["hidden_size"]), seed)
    named.setdefault("score.bias", torch.zeros(1))
    import_weights(chunks, named)
    for chunk in chunks:
        chunk.train()
    # As Hugging Face's class for it reads the folder of a checkpoint.
    return state_around(chunks, {**trunk, "id2label": {"0": "value"}}, parallel, optimizer)


def new_head(hidden_size: int, seed: int) -> dict[str, Tensor]:
    """`score.weight` and `score.bias` of a new critic; `seed` is the run's."""
    generator = torch.Generator().manual_seed(derive_seed("value-head", seed) % 2**63)
    weight = torch.randn(1, hidden_size, generator=generator) * HEAD_DEVIATION
    return {"score.weight": weight, "score.bias": torch.zeros(1)}


def _same_shape(policy: Mapping[str, Any], found: Mapping[str, Any], folder: str | Path) -> None:
    for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"):
        if policy.get(name) != found.get(name):
            raise InvalidArgument(
                explain(
                    "making a critic",
                    on=f"--critic-load {folder}, {name}",
                    expected=f"as the policy's: {policy.get(name)}",
                    found=found.get(name),
                    do="give a model of the policy's architecture, or leave --critic-load out",
                )
            )


def value_loss(
    values_N: Tensor, old_values_N: Tensor, returns_N: Tensor, value_clip: float
) -> tuple[Tensor, Tensor]:
    """max((V − R)², (V_clipped − R)²) a token, V_clipped = old + clip(V − old, −ε, ε).

    Schulman et al.'s PPO as implemented in OpenAI's baselines (`ppo2`, value clipping), without the
    factor ½, as slime has it. Returns the loss (float32 [N], with gradient; not masked, not
    averaged) and where |V − old| exceeds ε (bool [N]).
    """
    clipped_N = old_values_N + (values_N - old_values_N).clamp(-value_clip, value_clip)
    loss_N = torch.maximum((values_N - returns_N).square(), (clipped_N - returns_N).square())
    return loss_N, (values_N.detach() - old_values_N).abs() > value_clip
