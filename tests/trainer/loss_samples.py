"""Samples for tests of losses and corrections: drawn by hypothesis, or written down by ratios."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from hypothesis import strategies as st

from tests.trainer.reference_losses import Samples, Token
from trainer.algorithms.losses import LossInputs


def inputs_of(samples: Samples, *, requires_grad: bool = False) -> LossInputs:
    """As the trainer gives them; what is masked out has whatever values it has here."""
    flat = [token for sample in samples for token in sample]

    def column(name: str) -> torch.Tensor:
        return torch.tensor([getattr(t, name) for t in flat], dtype=torch.float32)

    return LossInputs(
        log_probs_N=column("log_prob").requires_grad_(requires_grad),
        old_log_probs_N=column("old"),
        rollout_log_probs_N=column("rollout"),
        advantages_N=column("advantage"),
        mask_N=torch.tensor([t.mask for t in flat], dtype=torch.bool),
        sequence_N=torch.tensor(
            [number for number, sample in enumerate(samples) for _ in sample], dtype=torch.int64
        ),
        n_sequences=len(samples),
    )


def of_ratios(
    ratios: Sequence[float],
    advantages: Sequence[float],
    *,
    mask: Sequence[int] | None = None,
    old: float = -1.0,
    mismatch: Sequence[float] | None = None,
) -> list[Token]:
    """One sample; old log-probs −1 each, `mismatch` = old − rollout (0 if not given)."""
    n = len(ratios)
    return [
        Token(old + math.log(r), old, old - x, a, bool(m))
        for r, a, x, m in zip(
            ratios, advantages, mismatch or [0.0] * n, mask or [1] * n, strict=True
        )
    ]


def _f32(value: float) -> float:
    return float(np.float32(value))


@st.composite
def drawn_samples(draw: st.DrawFn, *, spread: float = 1.5) -> list[list[Token]]:
    """0 to 4 samples of 0 to 4 tokens, masks of all kinds; |log-ratio| up to `spread`.

    A masked token may hold anything that is finite.
    """
    difference = st.floats(-spread, spread, width=32) | st.sampled_from([0.0, 0.1, -0.1])
    advantage = st.floats(-3, 3, width=32) | st.sampled_from([0.0, 1.0, -1.0])
    wild = st.sampled_from([0.0, -300.0, 1e30, -1e30])
    samples = []
    for _ in range(draw(st.integers(0, 4))):
        sample = []
        for _ in range(draw(st.integers(0, 4))):
            if draw(st.booleans()) or draw(st.booleans()):
                old = draw(st.floats(-6, -0.0625, width=32))
                sample.append(
                    Token(
                        _f32(min(old + draw(difference), 0.0)),
                        old,
                        _f32(old - draw(difference)),
                        draw(advantage),
                        True,
                    )
                )
            else:
                sample.append(Token(draw(wild), draw(wild), draw(wild), draw(wild), False))
        samples.append(sample)
    return samples
