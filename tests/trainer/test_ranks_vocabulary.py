"""Log-probs, entropy and gradients over a vocabulary that two ranks share, against one softmax."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.trainer.ranks import checks_vocabulary
from tests.trainer.ranks.pair import Pair
from trainer.kept_sets import KeptSets
from trainer.settings import ParallelSettings

pytestmark = pytest.mark.xdist_group("ranks")
TP2 = ParallelSettings(tensor_model_parallel_size=2)


@pytest.mark.parametrize("entropy_gradient", [False, True])
@pytest.mark.parametrize(
    ("width", "vocab_size"),
    [(8, 8), (8, 7), (12, 5)],
    ids=["even", "one row of padding", "a rank of padding alone"],
)
@pytest.mark.parametrize("with_sets", [False, True])
def test_it_is_the_softmax_over_the_whole(
    ranks: Pair, width: int, vocab_size: int, with_sets: bool, entropy_gradient: bool
) -> None:
    generator = torch.Generator().manual_seed(width + vocab_size)
    logits = torch.randn(6, width, generator=generator) * 4
    logits[:, vocab_size:] = 50.0  # what padding says must reach nothing
    targets = torch.tensor([0, 4, 2, 4, 1, 3])
    kept, allowed = None, torch.zeros(6, width, dtype=torch.bool)
    allowed[:, :vocab_size] = True
    if with_sets:
        sets = [[0, 4], [4], [], [3, 4, 1], [], [3, 0]]
        ids = np.array([i for one in sets for i in one], np.int32)
        kept = KeptSets(ids, np.array([len(one) for one in sets]))
        for row, one in enumerate(sets):
            if one:
                allowed[row] = False
                allowed[row, one] = True
    whole = logits.clone().requires_grad_()
    masked = whole.masked_fill(~allowed, -torch.inf)
    log_probs = torch.log_softmax(masked, dim=-1)
    expected = log_probs.gather(-1, targets[:, None])[:, 0]
    p_log_p = torch.where(allowed, log_probs.exp() * log_probs, torch.zeros(()))
    entropy = -p_log_p.sum(-1)
    weights = torch.linspace(-1, 2, 6)
    total = (weights * expected).sum()
    if entropy_gradient:
        # Only the finite terms are differentiated: inf · 0 in a backward is NaN.
        p = log_probs.exp()
        safe = torch.where(allowed, log_probs, torch.zeros(()))
        total = total + (weights.flip(0) * -(p * safe).sum(-1)).sum()
    total.backward()
    found = ranks.run(
        checks_vocabulary.own_columns,
        logits,
        targets,
        kept,
        vocab_size,
        entropy_gradient,
        layout=TP2,
    )
    for log_probs_n, entropy_n, _ in found:
        torch.testing.assert_close(log_probs_n, expected.detach(), rtol=0, atol=2e-6)
        torch.testing.assert_close(entropy_n, entropy.detach(), rtol=0, atol=2e-6)
        assert torch.equal(log_probs_n, found[0][0])
    gradient = torch.cat([grad for _, _, grad in found], dim=-1)
    torch.testing.assert_close(gradient, whole.grad, rtol=0, atol=2e-6)
    assert not gradient[:, vocab_size:].any()
