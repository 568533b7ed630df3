"""What an engine must say of its parameters, computed from canonical tensors."""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rollout.weights.checksums import mixed_words, parameter_checksum
from rollout.weights.parameters import Piece, RankPlace, Zeros, engine_parameters, together
from rollout.weights.payload import SharedChunk
from rollout.weights.staged import bytes_of, chunks, stage

LATENT = "model.layers.0.self_attn."


@pytest.mark.parametrize(
    ("shape", "dtype", "expected"),
    [
        ((5,), torch.float32, "8f4e26d6985fb5a6"),
        ((3, 7), torch.bfloat16, "126699b58cf2da13"),
        ((100, 100), torch.float32, "2abf00aea683a7bc"),
        ((9000, 3), torch.bfloat16, "3a068565a364ce96"),
    ],
)
def test_the_checksum_of_cuda_engines_is_that_of_sglangs_kernel(
    shape: tuple[int, ...], dtype: torch.dtype, expected: str
) -> None:
    """The numbers are those of SGLang 0.5.23's hash_tiles32_kernel_blocked, run by Triton's
    interpreter over the same tensors, drawn one after the other from this seed."""
    torch.manual_seed(0)
    drawn = {}
    for one, kind in (
        ((5,), torch.float32),
        ((3, 7), torch.bfloat16),
        ((100, 100), torch.float32),
        ((9000, 3), torch.bfloat16),
    ):
        drawn[one] = torch.randn(one).to(kind)
    tensor = drawn[shape]
    assert tensor.dtype == dtype
    assert mixed_words([bytes_of(tensor)]) == expected
    raw = bytes_of(tensor)
    assert mixed_words([raw[:9], raw[9:]]) == expected


@pytest.mark.parametrize(
    ("words", "expected"), [(8192 * 16 + 5, "a5d79e38cf628478"), (8192 * 8, "9de0a280676fa4b3")]
)
def test_tiles_are_added_up_as_the_kernel_does(words: int, expected: str) -> None:
    """From the kernel as above: more than is computed at once, and nothing left over."""
    tensor = torch.arange(words, dtype=torch.int32)
    if words % 8192:
        tensor.mul_(0x1E3779B1)
    assert mixed_words([bytes_of(tensor)]) == expected


def test_nothing_at_all_has_the_checksum_0() -> None:
    assert mixed_words([torch.zeros(0, dtype=torch.uint8)]) == "0" * 16


CONFIG: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 2}
DENSE = {
    "model.embed_tokens.weight": (130, 4),
    "model.layers.0.self_attn.q_proj.weight": (16, 4),
    "model.layers.0.self_attn.k_proj.weight": (4, 4),
    "model.layers.0.self_attn.v_proj.weight": (4, 4),
    "model.layers.0.self_attn.o_proj.weight": (4, 16),
    "model.layers.0.mlp.gate_proj.weight": (8, 4),
    "model.layers.0.mlp.up_proj.weight": (8, 4),
    "model.layers.0.mlp.down_proj.weight": (4, 8),
    "model.norm.weight": (4,),
}
DENSE_FOUND = (
    "model.embed_tokens.weight",
    "model.layers.0.self_attn.qkv_proj.weight",
    "model.layers.0.self_attn.o_proj.weight",
    "model.layers.0.mlp.gate_up_proj.weight",
    "model.layers.0.mlp.down_proj.weight",
    "model.norm.weight",
)


def test_the_slices_of_two_ranks() -> None:
    made = engine_parameters(DENSE_FOUND, DENSE, RankPlace(1, 2), CONFIG)
    layer = "model.layers.0."
    assert made == {
        # 130 rows are filled up to 192, 96 for each of two ranks.
        "model.embed_tokens.weight": [
            Piece("model.embed_tokens.weight", 0, 96, 130),
            Zeros("model.embed_tokens.weight", 62),
        ],
        f"{layer}self_attn.qkv_proj.weight": [
            Piece(f"{layer}self_attn.q_proj.weight", 0, 8, 16),
            Piece(f"{layer}self_attn.k_proj.weight", 0, 2, 4),
            Piece(f"{layer}self_attn.v_proj.weight", 0, 2, 4),
        ],
        f"{layer}self_attn.o_proj.weight": [Piece(f"{layer}self_attn.o_proj.weight", 1, 8, 16)],
        f"{layer}mlp.gate_up_proj.weight": [
            Piece(f"{layer}mlp.gate_proj.weight", 0, 4, 8),
            Piece(f"{layer}mlp.up_proj.weight", 0, 4, 8),
        ],
        f"{layer}mlp.down_proj.weight": [Piece(f"{layer}mlp.down_proj.weight", 1, 4, 8)],
        "model.norm.weight": [Piece("model.norm.weight", 0, 0, 4)],
    }


def test_ranks_without_a_key_head_of_their_own_share_one() -> None:
    rows = []
    for rank in range(4):
        made = engine_parameters(DENSE_FOUND, DENSE, RankPlace(rank, 4), CONFIG)
        key = made["model.layers.0.self_attn.qkv_proj.weight"][1]
        assert isinstance(key, Piece)
        rows.append((key.start, key.stop))
    assert rows == [(0, 2), (0, 2), (2, 4), (2, 4)]


def test_experts_are_dealt_out_and_then_split() -> None:
    shapes = {
        f"model.layers.1.mlp.experts.{number}.{half}_proj.weight": shape
        for number in range(4)
        for half, shape in (("gate", (6, 4)), ("up", (6, 4)), ("down", (4, 6)))
    }
    found = [f"model.layers.1.mlp.experts.{one}_weight" for one in ("w13", "w2")]
    made = engine_parameters(found, shapes, RankPlace(3, 4, ep_size=2), CONFIG)
    layer = "model.layers.1.mlp.experts."
    assert made[f"{layer}w13_weight"] == [
        Piece(f"{layer}{number}.{half}_proj.weight", 0, 3, 6)
        for number in (2, 3)
        for half in ("gate", "up")
    ]
    assert made[f"{layer}w2_weight"] == [
        Piece(f"{layer}{number}.down_proj.weight", 1, 3, 6) for number in (2, 3)
    ]


def test_a_shared_expert_without_parameters_of_its_own_is_one_more_expert() -> None:
    names = [f"experts.{n}" for n in range(2)] + ["shared_experts"]
    shapes = {
        f"model.layers.1.mlp.{name}.{half}_proj.weight": shape
        for name in names
        for half, shape in (("gate", (6, 4)), ("up", (6, 4)), ("down", (4, 6)))
    }
    found = ["model.layers.1.mlp.experts.w2_weight"]
    shared = "model.layers.1.mlp.shared_experts."
    made = engine_parameters(found, shapes, RankPlace(0, 1), CONFIG)
    assert made[found[0]][-1] == Piece(f"{shared}down_proj.weight", 1, 0, 6)
    apart = [*found, f"{shared}gate_up_proj.weight", f"{shared}down_proj.weight"]
    made = engine_parameters(apart, shapes, RankPlace(0, 1), CONFIG)
    assert len(made[found[0]]) == 2
    assert made[apart[1]] == [
        Piece(f"{shared}gate_proj.weight", 0, 0, 6),
        Piece(f"{shared}up_proj.weight", 0, 0, 6),
    ]


def test_a_gate_that_the_files_keep_above_its_up_is_split_apart() -> None:
    name = "model.layers.0.mlp.gate_up_proj.weight"
    made = engine_parameters([name], {name: (8, 4)}, RankPlace(1, 2), CONFIG)
    assert made == {name: [Piece(name, 0, 2, 4), Piece(name, 0, 6, 8)]}


def test_latent_attention_goes_together() -> None:
    names = [f"{LATENT}{one}.weight" for one in ("q_a_proj", "kv_a_proj_with_mqa", "q_b_proj")]
    shapes = dict(zip(names, [(6, 4), (5, 4), (8, 6)], strict=True))
    fused = f"{LATENT}fused_qkv_a_proj_with_mqa.weight"
    made = engine_parameters([fused, names[2]], shapes, RankPlace(1, 2), CONFIG)
    assert made == {
        fused: [Piece(names[0], 0, 0, 6), Piece(names[1], 0, 0, 5)],
        names[2]: [Piece(names[2], 0, 4, 8)],
    }
    assert together(names[1], names) == names[:2]
    base = stage(1, {name: torch.zeros(shape) for name, shape in shapes.items()}.items())
    after = stage(2, {**base.tensors, names[1]: torch.ones(5, 4)}.items(), base)
    assert after.changed_from(base) == sorted(names[:2])
    assert list(chunks(after, sorted(names), 1)) == [names[:2], [names[2]]]
    assert after.tensors[names[2]] is base.tensors[names[2]]


def test_a_tied_head_is_the_embedding_where_the_engine_keeps_both() -> None:
    shapes = {"model.embed_tokens.weight": (64, 4)}
    made = engine_parameters(["lm_head.weight"], shapes, RankPlace(0, 1), CONFIG)
    assert made == {"lm_head.weight": [Piece("model.embed_tokens.weight", 0, 0, 64)]}


def test_columns_are_hashed_as_the_rank_holds_them() -> None:
    tensor = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    tensors: dict[str, Tensor] = {"a": tensor}
    pieces = [Piece("a", 1, 3, 6), Zeros("a", 1)]
    held = torch.cat([tensor[:, 3:].reshape(-1), torch.zeros(6)]).numpy().tobytes()
    assert parameter_checksum(pieces, tensors, "sha256") == hashlib.sha256(held).hexdigest()[:16]


def test_what_looks_after_shared_memory_keeps_no_pipe_of_ours_open() -> None:
    chunk = SharedChunk({"a": torch.ones(3)})
    assert chunk.payload()
    managers = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
            if fields[0].endswith("(torch_shm_manag") and int(fields[2].split()[1]) == os.getpid():
                managers.append(os.readlink(f"/proc/{pid}/fd/2"))
    assert managers == ["/dev/null"]
