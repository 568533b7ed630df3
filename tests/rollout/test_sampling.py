"""Sampling as a function of (seed, position)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ledger.errors import InvalidArgument
from rollout.protocol import SamplingParams
from rollout.sampling import philox4x32, sample_tokens, uniforms


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # Random123, tests/kat_vectors: philox4x32-10
        ([0] * 4, [0] * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_gives_the_known_answers(counter: list[int], key: list[int], expected: str) -> None:
    out = philox4x32(np.array([counter], np.uint64), np.array([key], np.uint64))
    assert " ".join(f"{int(word):08x}" for word in out[0]) == expected


def test_uniforms_are_pinned() -> None:
    seeds = np.array([0, 0, 1, 2**62 + 12345], np.int64)
    found = uniforms(seeds, np.array([0, 1, 0, 1000], np.int64))
    assert found[0] == (0x6627E8D5 << 21 | 0xE169C58D >> 11) / 2**53
    assert [x.hex() for x in found] == PINNED


PINNED = [
    "0x1.989fa35785a70p-2",
    "0x1.f1c99948b9640p-1",
    "0x1.c7d00ce1ca141p-1",
    "0x1.fb3533b5b22bbp-1",
]


def test_uniforms_are_uniform() -> None:
    n = 100_000
    for seeds, positions in (
        (np.arange(n, dtype=np.int64), np.zeros(n, np.int64)),
        (np.zeros(n, np.int64), np.arange(n, dtype=np.int64)),
    ):
        found = uniforms(seeds, positions)
        counts, _ = np.histogram(found, bins=50, range=(0, 1))
        chi2 = ((counts - n / 50) ** 2 / (n / 50)).sum()
        assert chi2 < 95, "49 degrees of freedom: exceeded once in 10,000"
        assert abs(np.corrcoef(found[:-1], found[1:])[0, 1]) < 0.015


def draw(logits: list[float], n: int, **options: float) -> np.ndarray:
    chosen = sample_tokens(
        torch.tensor([logits]).expand(n, -1),
        np.arange(n, dtype=np.int64),
        np.full(n, 3, np.int64),
        **{"temperature": 1.0, **options},  # type: ignore[arg-type]
    )
    return np.bincount(chosen.numpy(), minlength=len(logits)) / n


def test_frequencies_match_the_distribution() -> None:
    logits = [1.0, 0.0, -1.0, float("-inf"), 2.0]
    for temperature in (1.0, 0.5, 3.0):
        expected = torch.softmax(torch.tensor(logits) / temperature, 0).numpy()
        assert np.abs(draw(logits, 40_000, temperature=temperature) - expected).max() < 0.01


def test_top_k_and_top_p_keep_what_they_say() -> None:
    probs = [0.1, 0.4, 0.2, 0.3]
    logits = np.log(probs).tolist()
    assert np.abs(draw(logits, 40_000, top_k=2) - [0, 4 / 7, 0, 3 / 7]).max() < 0.01
    assert np.abs(draw(logits, 40_000, top_p=0.65) - [0, 4 / 7, 0, 3 / 7]).max() < 0.01
    assert np.abs(draw(logits, 40_000, top_p=0.75) - [0, 4 / 9, 2 / 9, 3 / 9]).max() < 0.01
    assert draw(logits, 100, top_p=0.01).tolist() == [0, 1, 0, 0]
    assert draw(logits, 100, top_k=1).tolist() == [0, 1, 0, 0]


def test_ties_go_to_the_lower_id() -> None:
    assert draw([0.0, 1.0, 1.0], 50, temperature=0).tolist() == [0, 1, 0]
    assert draw([0.0, 1.0, 1.0], 50, top_k=1).tolist() == [0, 1, 0]


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(1, 6),
    vocab=st.integers(2, 70),
    seed=st.integers(0, 2**63 - 1),
    position=st.integers(0, 2**40),
    top_p=st.sampled_from([1.0, 0.8]),
    top_k=st.sampled_from([-1, 3]),
)
def test_a_choice_does_not_depend_on_the_batch(
    rows: int, vocab: int, seed: int, position: int, top_p: float, top_k: int
) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(rows, vocab, generator=generator)
    seeds = np.array([seed, *range(rows - 1)], np.int64)
    positions = np.array([position, *range(rows - 1)], np.int64)
    options = {"temperature": 0.9, "top_p": top_p, "top_k": top_k}
    whole = sample_tokens(logits, seeds, positions, **options)  # type: ignore[arg-type]
    for row in range(rows):
        pick = slice(row, row + 1)
        alone = sample_tokens(logits[pick], seeds[pick], positions[pick], **options)  # type: ignore[arg-type]
        assert int(alone[0]) == int(whole[row])


def test_the_largest_uniform_still_picks_a_possible_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    largest = np.array([1 - 2.0**-53])
    monkeypatch.setattr("rollout.sampling.uniforms", lambda *_: largest)
    logits = torch.tensor([[0.0, 3.0, 0.0, float("-inf"), float("-inf")]])
    one = np.zeros(1, np.int64)
    assert int(sample_tokens(logits, one, one, temperature=1.0)[0]) == 2


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_broken_logits_are_refused(bad: float) -> None:
    logits = torch.tensor([[0.0, 1.0], [0.0, bad]])
    two = np.zeros(2, np.int64)
    with pytest.raises(InvalidArgument, match="row 1 of the batch"):
        sample_tokens(logits, two, two, temperature=1.0)


@pytest.mark.parametrize(
    "wrong",
    [{"temperature": -1}, {"top_p": 0}, {"top_p": 1.1}, {"top_k": 0}, {"max_new_tokens": 0}],
)
def test_sampling_parameters_are_checked(wrong: dict[str, float]) -> None:
    with pytest.raises(InvalidArgument, match=next(iter(wrong))):
        SamplingParams(**wrong)  # type: ignore[arg-type]
