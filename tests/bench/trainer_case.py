"""The step that is measured on both sides: a model, prompts, long-tailed responses, rewards."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["Case", "answer", "commands", "long_tailed", "make_model", "peak_bytes"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Everything that both sides must agree on; made from numbers alone."""

    samples: int
    n_samples_per_prompt: int
    prompt_length: int
    median_response: int
    longest_response: int
    micro_batch_size: int
    max_tokens: int
    """Of a packed micro-batch."""
    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    intermediate_size: int
    threads: int
    lr: float = 1e-6
    adam_beta2: float = 0.98
    same_length: bool = False
    """All responses as long as `median_response`: nothing is padded on either side."""

    @property
    def lengths_B(self) -> np.ndarray:  # noqa: N802
        """Response tokens of each sample."""
        if self.same_length:
            return np.full(self.samples, self.median_response, np.int64)
        return long_tailed(
            self.samples, median=self.median_response, longest=self.longest_response, seed=7
        )

    @property
    def tokens(self) -> int:
        """Of all prompts and responses, padding left out."""
        return int(self.lengths_B.sum()) + self.samples * self.prompt_length

    def prompts(self) -> list[np.ndarray]:
        """int32 tokens of each group's prompt."""
        random = np.random.default_rng(8)
        groups = self.samples // self.n_samples_per_prompt
        return [self._drawn(random, self.prompt_length) for _ in range(groups)]

    def responses(self) -> list[np.ndarray]:
        """int32 tokens of each sample."""
        random = np.random.default_rng(9)
        return [self._drawn(random, length) for length in self.lengths_B]

    def _drawn(self, random: np.random.Generator, length: int) -> np.ndarray:
        return random.integers(3, self.vocab_size, int(length), dtype=np.int32)

    def rewards(self) -> list[float]:
        """Right or wrong, at random, with both in every group."""
        drawn = np.random.default_rng(10).integers(0, 2, self.samples).astype(float)
        drawn[:: self.n_samples_per_prompt], drawn[1 :: self.n_samples_per_prompt] = 1.0, 0.0
        return list(drawn.tolist())

    def text(self) -> str:
        """As one line of JSON."""
        return json.dumps(dataclasses.asdict(self))


def long_tailed(count: int, *, median: int, longest: int, seed: int) -> np.ndarray:
    """Log-normal lengths, standard deviation 1 of the logarithm, cut off at `longest`."""
    drawn = np.random.default_rng(seed).lognormal(np.log(median), 1.0, count)
    return np.clip(drawn.astype(np.int64), 4, longest)


def make_model(case: Case, folder: Path) -> int:
    """Write a random Llama and a tokenizer of as many words; returns its number of parameters."""
    import torch
    import transformers
    from tokenizers import Tokenizer, models

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=case.vocab_size,
        hidden_size=case.hidden_size,
        num_hidden_layers=case.layers,
        num_attention_heads=case.heads,
        num_key_value_heads=case.kv_heads,
        intermediate_size=case.intermediate_size,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = transformers.LlamaForCausalLM(config).float()
    model.save_pretrained(folder)
    words = ["<pad>", "<s>", "</s>", *(f"w{i}" for i in range(3, case.vocab_size))]
    tokenizer = Tokenizer(
        models.WordLevel(dict(zip(words, range(len(words)), strict=True)), "<pad>")
    )
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def commands() -> Any:
    """What the parent asks of a child, one word a line, until it closes the pipe."""
    for line in sys.stdin:
        yield line.strip()


def answer(**numbers: Any) -> None:
    """Tell the parent, on one line."""
    print("ANSWER " + json.dumps(numbers), flush=True)


def peak_bytes() -> int:
    """Largest resident memory of this process so far."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    raise RuntimeError("/proc/self/status has no VmHWM")
