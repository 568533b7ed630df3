"""Tiny Qwen3 models made on the spot: random weights, a character tokenizer, a short warm-up.

The warm-up is supervised, on answers of which a share is wrong: it teaches the form of an answer
and some of the task, so that groups earn mixed rewards from the first step. It is part of the
model, not of the run: say so wherever a reward curve of such a model is shown.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from ledger.errors import InvalidArgument, explain
from ledger.seeds import derive_seed
from rollout.models.folder import already_made, new_folder
from rollout.models.tokenizer import (
    EOS_TOKEN_ID,
    PAD_TOKEN_ID,
    VOCAB_SIZE,
    character_tokenizer,
)
from rollout.quiet import without_progress_bars
from rollout.tasks import PromptSource, create_source, stop_token_ids

__all__ = ["TinySettings", "make_tiny_model"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TinySettings:
    """All that decides the bytes of a tiny model, beside package versions and thread count."""

    moe: bool = False
    task: str = "reasoning_gym:spell_backward"
    task_options: str = "{}"
    seed: int = 0
    hidden_size: int = 64
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    intermediate_size: int = 192
    moe_intermediate_size: int = 96
    num_experts: int = 8
    num_experts_per_tok: int = 2
    max_position_embeddings: int = 64
    tie_word_embeddings: bool = True
    warmup_steps: int = 220
    warmup_batch_size: int = 96
    warmup_lr: float = 6e-3
    wrong_share: float = 0.3
    """Share of the answers whose characters are shuffled."""


_MOE = {"warmup_steps": 150}
"""A step of a mixture takes longer: fewer of them, for a task that must then be easier."""


def _build(settings: TinySettings) -> Any:
    """The model with its seeded random weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    shared: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": settings.hidden_size,
        "num_hidden_layers": settings.num_hidden_layers,
        "num_attention_heads": settings.num_attention_heads,
        "num_key_value_heads": settings.num_key_value_heads,
        "head_dim": settings.hidden_size // settings.num_attention_heads,
        "intermediate_size": settings.intermediate_size,
        "max_position_embeddings": settings.max_position_embeddings,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": settings.tie_word_embeddings,
        "bos_token_id": None,
        "eos_token_id": EOS_TOKEN_ID,
        "pad_token_id": PAD_TOKEN_ID,
        "dtype": "float32",
        "attn_implementation": "eager",
    }
    torch.manual_seed(derive_seed("tiny_model", settings.seed))
    if not settings.moe:
        return Qwen3ForCausalLM(Qwen3Config(**shared))
    model = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **shared,
            moe_intermediate_size=settings.moe_intermediate_size,
            num_experts=settings.num_experts,
            num_experts_per_tok=settings.num_experts_per_tok,
            norm_topk_prob=True,
            decoder_sparse_step=1,
            mlp_only_layers=[],
        )
    )
    model.set_experts_implementation("grouped_mm")
    return model


def _batch(
    source: PromptSource, tokenizer: Any, settings: TinySettings, step: int, stop: int
) -> tuple[Tensor, Tensor]:
    """Tokens [B, T] and targets [B, T] of one warm-up step; targets are -100 outside answers."""
    texts, answers = [], []
    for i in range(settings.warmup_batch_size):
        row = step * settings.warmup_batch_size + i
        prompt = source.prompt(row)
        answer = list(prompt.label or "")
        random = Random(derive_seed("warm-up", settings.seed, row))
        if random.random() < settings.wrong_share:
            if len(set(answer)) > 1:
                random.shuffle(answer)
            else:
                answer = list(str(random.randrange(10)))
        texts.append(prompt.text)
        answers.append("".join(answer))
    # One call for all texts: a call has a large fixed cost.
    encoded = tokenizer(texts + answers, add_special_tokens=False)["input_ids"]
    rows = [
        (asked, [*said, stop])
        for asked, said in zip(encoded[: len(texts)], encoded[len(texts) :], strict=True)
    ]
    width = max(len(asked) + len(said) for asked, said in rows)
    tokens = torch.full((len(rows), width), PAD_TOKEN_ID)
    targets = torch.full((len(rows), width), -100)
    for i, (asked, said) in enumerate(rows):
        tokens[i, : len(asked) + len(said)] = torch.tensor(asked + said)
        targets[i, len(asked) : len(asked) + len(said)] = torch.tensor(said)
    return tokens, targets


def _warm_up(
    model: Any,
    tokenizer: Any,
    settings: TinySettings,
    progress: Callable[[int, int, float], None] | None,
) -> None:
    """Supervised steps of Adam on partly wrong answers to prompts of a seed of their own."""
    source = create_source(
        settings.task,
        seed=derive_seed("warm-up prompts", settings.seed),
        options=settings.task_options,
    )
    stop = stop_token_ids(source, tokenizer)[0]
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.warmup_lr, weight_decay=0.0)
    model.train()
    for step in range(settings.warmup_steps):
        tokens, targets = _batch(source, tokenizer, settings, step, stop)
        logits = model(input_ids=tokens, use_cache=False).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(
            logits.reshape(-1, VOCAB_SIZE), targets[:, 1:].reshape(-1), ignore_index=-100
        )
        # A linear ramp over 20 steps, then a linear fall over the second half.
        left = 2 * (settings.warmup_steps - step) / settings.warmup_steps
        for group in optimizer.param_groups:
            group["lr"] = settings.warmup_lr * min(1.0, (step + 1) / 20, left)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if progress is not None:
            progress(step + 1, settings.warmup_steps, float(loss.detach()))
    model.eval()


def _recipe(settings: TinySettings, num_threads: int) -> dict[str, Any]:
    """What the bytes depend on, as JSON; equal recipes need no new model."""
    import tokenizers
    import transformers

    return asdict(settings) | {
        "num_threads": num_threads,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "tokenizers": tokenizers.__version__,
    }


def make_tiny_model(
    directory: str | Path,
    *,
    moe: bool = False,
    task: str = "reasoning_gym:spell_backward",
    seed: int = 0,
    num_threads: int = 1,
    progress: Callable[[int, int, float], None] | None = None,
    **changes: Any,
) -> Path:
    """Make a tiny Qwen3 (103 k parameters) or Qwen3-MoE (325 k) as a Hugging Face folder.

    Deterministic for equal settings, versions and `num_threads`; a folder that was made with the
    same ones is left as it is. `changes` are other fields of `TinySettings`. The folder appears
    whole or not at all. `progress(step, steps, loss)` is called after each warm-up step. The number
    of threads, torch's random state and its determinism flag are as before afterwards.

    Raises:
        AlreadyExists: the folder holds something else.
        InvalidArgument: an unknown setting or task.
    """
    try:
        settings = TinySettings(moe=moe, task=task, seed=seed, **((_MOE if moe else {}) | changes))
    except TypeError as error:
        raise InvalidArgument(
            explain("making a tiny model", on=str(sorted(changes)), found=str(error))
        ) from error
    target = Path(directory)
    recipe = _recipe(settings, num_threads)
    if already_made(target, recipe, what="making a tiny model"):
        return target
    threads, random_state = torch.get_num_threads(), torch.get_rng_state()
    deterministic = torch.are_deterministic_algorithms_enabled()
    try:
        torch.set_num_threads(num_threads)
        torch.use_deterministic_algorithms(True)
        model, tokenizer = _build(settings), character_tokenizer()
        _warm_up(model, tokenizer, settings, progress)
        with new_folder(target, recipe) as folder, without_progress_bars():
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
    finally:
        torch.set_num_threads(threads)
        torch.set_rng_state(random_state)
        torch.use_deterministic_algorithms(deterministic)
    return target
