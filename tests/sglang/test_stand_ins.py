"""What stands in for CUDA code computes what that code would, and refuses what it cannot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

_CPU = Path(__file__).parent / "cpu"


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(_CPU))
    import sgl_kernel

    return sgl_kernel


@pytest.mark.parametrize(
    ("data", "seed", "expected"),
    [
        (b"", 0, 0),
        (b"", 1, 0x514E28B7),
        (b"", 0xFFFFFFFF, 0x81F16F39),
        (b"\xff\xff\xff\xff", 0, 0x76293B50),
        (b"\x21\x43\x65\x87", 0, 0xF55B516B),
        (b"\x21\x43\x65\x87", 0x5082EDEE, 0x2362F9DE),
        (b"\x00\x00\x00\x00", 0, 0x2362F9DE),
        (b"aaaa", 0x9747B28C, 0x5A97808A),
        (b"abcd", 0x9747B28C, 0xF0478627),
    ],
)
def test_murmur3_gives_its_known_answers(
    kernels: Any, data: bytes, seed: int, expected: int
) -> None:
    """Answers of the reference implementation (SMHasher) that other implementations quote too."""
    words = [
        torch.tensor([int.from_bytes(data[i : i + 4], "little")]) for i in range(0, len(data), 4)
    ]
    assert kernels.murmur.murmur3_32_words(words, seed).reshape(-1).tolist() == [expected]


def test_noise_is_a_function_of_seed_position_and_column(kernels: Any) -> None:
    """As the operator that SGLang calls: [B] 64-bit seeds, [B] positions, [V] columns."""
    seeds = torch.tensor([5, 5, 2**40 + 5], dtype=torch.uint64)
    positions = torch.tensor([7, 8, 7])
    hashed = torch.ops.sgl_kernel.murmur_hash32_cpu.default(seeds, positions, torch.arange(3))
    assert hashed.dtype == torch.uint32
    assert hashed.shape == (3, 3)
    assert len(set(hashed.reshape(-1).tolist())) == 9
    words = [torch.tensor(x) for x in (5, 2**8, 7, 2)]
    assert hashed[2, 2].item() == kernels.murmur.murmur3_32_words(words).item()


def test_slots_of_new_tokens_go_into_their_rows(kernels: Any) -> None:
    table = torch.zeros((3, 5), dtype=torch.int32)
    kernels.assign_req_to_token_pool_cpu(
        torch.tensor([2, 0]), table, torch.tensor([1, 0]), torch.tensor([4, 1]),
        torch.tensor([11, 12, 13, 14]), 5,
    )  # fmt: skip
    assert table.tolist() == [[14, 0, 0, 0, 0], [0] * 5, [0, 11, 12, 13, 0]]


def test_any_other_kernel_says_that_it_is_not_there(kernels: Any) -> None:
    with pytest.raises(NotImplementedError, match=r"sgl_kernel\.merge_state_v2 was called"):
        kernels.merge_state_v2(torch.zeros(1))
