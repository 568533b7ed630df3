"""Packed rows: the same bits as each sequence alone, and the gradients of the padded layout."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ledger.errors import InvalidArgument
from tests.trainer.megatron_models import DENSE, MOE, random_tokens
from trainer.architecture import read_architecture
from trainer.forward import logits_of
from trainer.megatron import AttnBackend
from trainer.model import build_model, read_config, transformer_config
from trainer.packed_attention import packed_sequences
from trainer.state import load_weights

LENGTHS = (7, 1, 19, 12)
"""A sequence of one token among them; alone it is a row of one, whose matrix products MKL computes
in another way (rows of four or more come out alike, whatever else is in the product)."""


@pytest.fixture
def built(tiny, megatron) -> Iterator[Any]:
    def build(kind: str) -> Any:
        folder = tiny(kind).folder
        model = build_model(read_config(folder), megatron, trainable=True)
        load_weights(model, folder)
        return model

    return build


def packed_logits(model: Any, sequences: list[Tensor]) -> list[Tensor]:
    """[T, V] of each sequence, all in one row."""
    lengths = [len(one) for one in sequences]
    starts = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    positions = torch.cat([torch.arange(n) for n in lengths])
    logits = model(
        torch.cat(sequences)[None],
        positions[None],
        None,
        packed_seq_params=packed_sequences(starts),
    )
    return list(logits[0].split(lengths))


def sequences() -> list[Tensor]:
    return [random_tokens(1, n, seed=n)[0] for n in LENGTHS]


@pytest.mark.parametrize("kind", DENSE)
def test_a_sequence_has_the_same_bits_packed_and_alone(kind: str, built) -> None:
    """Dense models on a CPU. With experts, matrix products take what was routed from elsewhere."""
    model = built(kind)
    with torch.no_grad():
        together = packed_logits(model, sequences())
        for one, logits in zip(sequences(), together, strict=True):
            if len(one) < 4:
                continue
            (alone,) = packed_logits(model, [one])
            assert torch.equal(logits, alone)
            assert torch.equal(logits, logits_of(model, one[None])[0])


@pytest.mark.parametrize("kind", MOE)
def test_experts_see_the_same_tokens_packed_and_padded(kind: str, built) -> None:
    model = built(kind)
    with torch.no_grad():
        for one, logits in zip(sequences(), packed_logits(model, sequences()), strict=True):
            (alone,) = packed_logits(model, [one])
            torch.testing.assert_close(logits, alone, rtol=0, atol=2e-5)


@pytest.mark.parametrize("backend", [AttnBackend.auto, AttnBackend.flash])
@pytest.mark.parametrize("kind", [DENSE[1], DENSE[2]])
def test_gradients_are_those_of_the_padded_layout(kind: str, backend, built) -> None:
    """Within 2e-5 of the largest: float32 sums over tokens in another order."""
    model = built(kind)
    weights = [torch.randn(n, model.vocab_size, generator=_generator(n)) for n in LENGTHS]

    def gradients(of: list[Tensor]) -> dict[str, Tensor]:
        model.zero_grad()
        sum((w * x).sum() for w, x in zip(weights, of, strict=True)).backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    padded = torch.zeros(len(LENGTHS), max(LENGTHS), dtype=torch.int64)
    for row, one in zip(padded, sequences(), strict=True):
        row[: len(one)] = one
    logits = logits_of(model, padded)
    expected = gradients([row[:n] for row, n in zip(logits, LENGTHS, strict=True)])
    model.config.attention_backend = backend
    found = gradients(packed_logits(model, sequences()))
    for name, gradient in expected.items():
        tolerance = 2e-5 * float(gradient.abs().max())
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=tolerance, msg=name)


@pytest.mark.parametrize("backend", list(AttnBackend))
def test_the_backend_asked_for_is_megatrons(backend: AttnBackend, tiny, megatron) -> None:
    architecture = read_architecture(read_config(tiny("llama").folder))
    layout = dataclasses.replace(megatron, attention_backend=backend.name)
    assert transformer_config(architecture, layout).attention_backend is backend


@pytest.mark.parametrize("kind", DENSE)
def test_torchs_kernel_agrees_with_megatrons(kind: str, built) -> None:
    model = built(kind)
    tokens = random_tokens(3, 24)
    with torch.no_grad():
        expected = logits_of(model, tokens)
        model.config.attention_backend = AttnBackend.flash
        found = logits_of(model, tokens)
        assert torch.equal(found, logits_of(model, tokens))
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)


def test_a_sequence_sees_nothing_of_its_neighbours(built) -> None:
    model = built("llama")
    with torch.no_grad():
        before = packed_logits(model, sequences())
        others = sequences()
        others[2] = (others[2] + 1) % model.vocab_size
        after = packed_logits(model, others)
    for number in (0, 1, 3):
        assert torch.equal(before[number], after[number])
    assert not torch.equal(before[2], after[2])


@pytest.mark.parametrize("starts", [[0], [0, 4, 4], [1, 4], [0, 5, 3]])
def test_starts_that_cannot_be_are_refused(starts: list[int]) -> None:
    with pytest.raises(InvalidArgument, match="ascending numbers from 0"):
        packed_sequences(torch.tensor(starts, dtype=torch.int32))


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
