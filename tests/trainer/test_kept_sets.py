"""Log-softmax over recorded sets, against numpy in float64, with its gradient."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.kept_sets import KeptSets, log_probs_over_sets


def plain(logits, target, kept):
    """ln p of the target, entropy and gradient d ln p / d logits of one token, float64."""
    kept = np.arange(len(logits)) if len(kept) == 0 else np.asarray(kept)
    x = logits[kept] - logits[kept].max()
    p = np.exp(x) / np.exp(x).sum()
    gradient = np.zeros(len(logits))
    gradient[kept] -= p
    gradient[target] += 1
    log_prob = logits[target] - logits[kept].max() - np.log(np.exp(x).sum())
    return log_prob, -(p * np.log(p)).sum(), gradient


@given(st.integers(0, 2**32 - 1))
def test_against_numpy_in_float64(seed):
    rng = np.random.default_rng(seed)
    n, V = int(rng.integers(1, 6)), int(rng.integers(2, 12))
    logits = rng.normal(0, 4, (n, V))
    targets = rng.integers(0, V, n)
    kept = []
    for target in targets:
        size = int(rng.integers(0, V + 1))
        others = np.setdiff1d(rng.permutation(V)[:size], [target])
        kept.append([] if size == 0 else sorted([*others.tolist(), int(target)]))
    sets = KeptSets(
        np.array([i for ids in kept for i in ids], np.int32), np.array([len(k) for k in kept])
    )
    x = torch.tensor(logits, requires_grad=True)
    found, entropy = log_probs_over_sets(x, torch.from_numpy(targets), sets, want_entropy=True)
    found.sum().backward()
    for row in range(n):
        log_prob, h, gradient = plain(logits[row], targets[row], kept[row])
        np.testing.assert_allclose(found[row].item(), log_prob, atol=1e-12)
        np.testing.assert_allclose(entropy[row].item(), h, atol=1e-10)
        np.testing.assert_allclose(x.grad[row].numpy(), gradient, atol=1e-12)
    part = sets.of(np.arange(n)[::-1].copy())
    again, _ = log_probs_over_sets(
        x.flip(0), torch.from_numpy(targets).flip(0), part, want_entropy=False
    )
    assert torch.equal(again.flip(0), found)
