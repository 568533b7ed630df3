"""Parts of micro-batches for context-parallel ranks, TransformerEngine's names, refusals."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ledger.errors import InvalidArgument
from tests.trainer.tiny_policy import config
from trainer import layout, schedule
from trainer.architecture import read_architecture
from trainer.context_parallel import context_part, own_places, with_even_sequences
from trainer.kept_sets import KeptSets
from trainer.layout import check_layout
from trainer.microbatch import MicroBatch
from trainer.schedule import widened_to
from trainer.settings import ParallelSettings
from trainer.transformer_engine import check_architecture, require_engine
from trainer.weights.names import tensor_parts


def micro_batch(lengths: list[list[int]], *, packed: bool, take: int | None = None) -> MicroBatch:
    """Of samples of [prompt, response] tokens, which are numbered from 1; experts tell the token.

    With `take`, only so many response tokens are in a loss at all.
    """
    prompts, responses = np.array(lengths).T
    totals = prompts + responses
    width = int(totals.sum() + 1 if packed else totals.max())
    rows = 1 if packed else len(lengths)
    starts = np.cumsum(totals) - totals if packed else np.arange(len(lengths)) * width
    tokens = np.zeros(rows * width, np.int64)
    positions = np.zeros(rows * width, np.int64)
    columns = []
    for s, start in enumerate(starts):
        tokens[start : start + totals[s]] = np.arange(totals[s]) + 1 + 10 * s
        positions[start : start + totals[s]] = np.arange(totals[s])
        columns += list(range(start + prompts[s] - 1, start + totals[s] - 1))
    columns_n = np.array(columns)
    sample_n = np.repeat(np.arange(len(lengths)), responses)
    if take is not None:
        columns_n, sample_n = columns_n[:take], sample_n[:take]
    n = len(columns_n)
    shape = (rows, width)
    ids = np.stack([tokens, tokens + 100], axis=1).reshape(*shape, 1, 2)
    return MicroBatch(
        number=0,
        samples=slice(0, len(lengths)),
        responses=slice(0, n),
        tokens_BT=tokens.reshape(shape),
        positions_BT=positions.reshape(shape),
        sequence_starts=np.append(starts, totals.sum()).astype(np.int32) if packed else None,
        columns_n=columns_n,
        targets_n=tokens[columns_n + 1],
        sample_n=sample_n,
        temperatures_n=np.linspace(0.5, 1.5, n),
        kept_sets=KeptSets(
            np.stack([tokens[columns_n + 1], np.full(n, 39)], axis=1).ravel().astype(np.int32),
            np.full(n, 2),
        ),
        expert_ids=ids,
        expert_weights=ids.astype(np.float32),
        routed_BT=tokens.reshape(shape) > 0,
    )


SAMPLES = st.lists(
    st.tuples(st.integers(1, 5), st.integers(1, 5)).map(list), min_size=1, max_size=4
)


@given(SAMPLES, st.integers(1, 3), st.integers(1, 2), st.booleans())
def test_every_token_is_on_one_rank(
    lengths: list[list[int]], size: int, tensor: int, packed: bool
) -> None:
    before = micro_batch(lengths, packed=packed)
    if packed:
        whole = with_even_sequences(before, 2 * size, 2 * size * tensor)
    else:
        whole = widened_to(before, 2 * size * tensor)
    assert whole.tokens_BT.shape[1] % (2 * size * tensor) == 0
    flat = whole.tokens_BT.reshape(-1)
    assert sorted(flat[flat > 0]) == sorted(before.tokens_BT[before.tokens_BT > 0])
    np.testing.assert_array_equal(flat[whole.columns_n + 1], before.targets_n)
    parts = [context_part(whole, rank, size) for rank in range(size)]
    assert {part.tokens_BT.shape for part in parts} == {
        (len(whole.tokens_BT), whole.tokens_BT.shape[1] // size)
    }
    together = np.concatenate([part.tokens_BT.reshape(-1) for part in parts])
    assert sorted(together) == sorted(flat)
    taken = np.concatenate([part.context.own_o for part in parts])
    assert sorted(taken) == list(range(len(before.columns_n)))
    for part in parts:
        own = part.context.own_o
        tokens = part.tokens_BT.reshape(-1)
        real = tokens > 0
        # The token that predicts is that of the whole, and what is known of its logits is there.
        np.testing.assert_array_equal(tokens[part.columns_n], flat[whole.columns_n[own]])
        np.testing.assert_array_equal(part.targets_n, before.targets_n[own])
        np.testing.assert_array_equal(part.temperatures_n, before.temperatures_n[own])
        assert part.kept_sets.ids_K.tolist() == before.kept_sets.of(own).ids_K.tolist()
        for values in (part.expert_ids, part.expert_weights):
            at = values.reshape(-1, 2)[real]
            np.testing.assert_array_equal(at, np.stack([tokens, tokens + 100], axis=1)[real])
        np.testing.assert_array_equal(part.routed_BT.reshape(-1), real)
        np.testing.assert_array_equal(part.positions_BT.reshape(-1)[real], (tokens[real] - 1) % 10)
        assert part.sample_n is whole.sample_n
        here = part.context.here
        np.testing.assert_array_equal(flat[here >= 0], tokens[here[here >= 0]])


def test_padding_has_different_experts() -> None:
    whole = with_even_sequences(micro_batch([[2, 3], [1, 2]], packed=True), 4, 8)
    assert whole.sequence_starts.tolist() == [0, 8, 12, 16]
    padding = whole.tokens_BT[0] == 0
    assert padding.sum() == 8
    assert whole.expert_ids[0, padding].tolist() == [[[0, 1]]] * 8
    assert whole.expert_weights[0, padding].tolist() == [[[0.5, 0.5]]] * 8


@pytest.mark.parametrize("size", [2, 3])
def test_rows_are_cut_as_megatron_cuts_them(size: int, megatron: ParallelSettings) -> None:
    import inspect

    from megatron.core import utils

    whole = widened_to(micro_batch([[5, 4], [9, 3], [2, 2]], packed=False), 2 * size)
    cut = utils.get_batch_on_this_cp_rank
    fixed: dict[str, Any] = {}
    if "is_hybrid_cp" in inspect.signature(cut).parameters:  # 0.19
        fixed = {"is_hybrid_cp": False}
    for rank in range(size):
        group = SimpleNamespace(size=lambda: size, rank=lambda rank=rank: rank)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(utils, "get_pg_size", lambda group: group.size())
            patch.setattr(utils, "get_pg_rank", lambda group: group.rank())
            theirs = cut({"tokens": torch.from_numpy(whole.tokens_BT)}, cp_group=group, **fixed)
        ours = context_part(whole, rank, size).tokens_BT
        assert ours.tolist() == theirs["tokens"].tolist()


def test_sequences_of_packed_rows_are_cut_one_by_one() -> None:
    """Chunks r and 2·size − 1 − r of each, as TransformerEngine's thd_get_partitioned_indices."""
    starts = np.array([0, 4, 12])
    assert own_places(starts, 0, 2).tolist() == [0, 3, 4, 5, 10, 11]
    assert own_places(starts, 1, 2).tolist() == [1, 2, 6, 7, 8, 9]
    with pytest.raises(InvalidArgument, match="multiples of 2 × 2"):
        own_places(np.array([0, 4, 10]), 0, 2)


def test_only_packed_rows_are_laid_out_anew() -> None:
    with pytest.raises(InvalidArgument, match="a packed row"):
        with_even_sequences(micro_batch([[1, 1]], packed=False), 4, 4)


CP2 = {"context_parallel_size": 2}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (CP2, "--bf16"),
        (CP2 | {"bf16": True, "attention_backend": "unfused"}, "--attention-backend"),
        (CP2 | {"bf16": True, "megatron": {"cp_comm_type": "a2a+p2p"}}, "--cp-comm-type"),
        ({"megatron": {"transformer_impl": "inference_optimized"}}, "--transformer-impl"),
    ],
)
def test_what_the_kernels_cannot_do_is_refused(
    change: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "find_spec", lambda name: SimpleNamespace())
    with pytest.raises(InvalidArgument, match=message):
        check_layout(ParallelSettings(**change), 2, cuda=True)


@pytest.mark.parametrize(("cuda", "found"), [(False, "no CUDA device"), (True, "not installed")])
@pytest.mark.parametrize(
    "change", [CP2 | {"bf16": True}, {"megatron": {"transformer_impl": "transformer_engine"}}]
)
def test_without_transformer_engine_it_is_refused(
    change: dict[str, Any], cuda: bool, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "find_spec", lambda name: None)
    with pytest.raises(InvalidArgument, match=found):
        check_layout(ParallelSettings(**change), 2, cuda=cuda)


def test_with_it_the_layout_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "find_spec", lambda name: SimpleNamespace())
    for change in (CP2, {"megatron": {"transformer_impl": "transformer_engine"}}):
        check_layout(ParallelSettings(bf16=True, **change), 2, cuda=True)
    with pytest.raises(InvalidArgument, match="divisor of the number of ranks, 3"):
        check_layout(ParallelSettings(bf16=True, **CP2), 3, cuda=True)


def test_an_engine_that_does_not_import_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib

    def fails(name: str) -> None:
        raise OSError("libcudnn.so.9: cannot open shared object file")

    monkeypatch.setattr(importlib, "import_module", fails)
    with pytest.raises(InvalidArgument, match=r"(?s)--context-parallel-size.*libcudnn"):
        require_engine("--context-parallel-size")


@pytest.mark.parametrize("kinds", ["all_gather", ["p2p", "a2a"]])
def test_packed_rows_go_from_rank_to_rank(kinds: Any) -> None:
    settings = SimpleNamespace(
        context_parallel_size=2,
        cp_comm_type=kinds,
        expert_model_parallel_size=1,
        pipeline_model_parallel_size=1,
    )
    packed = micro_batch([[1, 2]], packed=True)
    with pytest.raises(InvalidArgument, match="--cp-comm-type"):
        schedule._check(settings, [packed], 1)
    schedule._check(settings, [micro_batch([[1, 2]], packed=False)], 1)
    for allowed in (None, "p2p", ["p2p", "p2p"]):
        settings.cp_comm_type = allowed
        schedule._check(settings, [packed], 1)


def test_architectures_without_such_layers_are_refused() -> None:
    qwen = read_architecture(config(moe=False))
    moe = read_architecture(config(moe=True))

    def settings(context: int, kind: str, expert_tensor: int = 1) -> Any:
        return SimpleNamespace(
            context_parallel_size=context,
            transformer_impl=kind,
            expert_tensor_parallel_size=expert_tensor,
        )

    latent = dataclasses.replace(qwen, latent=SimpleNamespace())  # type: ignore[arg-type]
    for architecture in (qwen, moe):
        check_architecture(architecture, settings(2, "local", 2))
        check_architecture(architecture, settings(1, "transformer_engine"))
    check_architecture(latent, settings(1, "local"))
    for wanted in (settings(2, "local"), settings(1, "transformer_engine")):
        with pytest.raises(InvalidArgument, match="latent attention"):
            check_architecture(latent, wanted)
    with pytest.raises(InvalidArgument, match="--expert-tensor-parallel-size 1"):
        check_architecture(moe, settings(1, "transformer_engine", 2))


def test_norms_inside_projections_have_their_names() -> None:
    """The parameters of a layer of Megatron's TransformerEngine spec, as its source names them."""
    architecture = read_architecture(config(moe=False))
    shapes = {
        "self_attention.linear_qkv.layer_norm_weight": (16,),
        "self_attention.linear_qkv.weight": (32, 16),
        "self_attention.linear_proj.weight": (16, 16),
        "self_attention.q_layernorm.weight": (8,),
        "self_attention.k_layernorm.weight": (8,),
        "mlp.linear_fc1.layer_norm_weight": (16,),
        "mlp.linear_fc1.weight": (64, 16),
        "mlp.linear_fc2.weight": (16, 32),
    }
    tensors = {
        f"decoder.layers.0.{name}": torch.nn.Parameter(torch.zeros(shape))
        for name, shape in shapes.items()
    }
    parts = {part.name: part for part in tensor_parts(architecture, tensors, layer_offset=1)}
    stem = "model.layers.1"
    assert set(parts) == {
        f"{stem}.{name}.weight"
        for name in (
            "input_layernorm",
            "post_attention_layernorm",
            *(f"self_attn.{one}" for one in ("q_proj", "k_proj", "v_proj", "o_proj")),
            *(f"self_attn.{one}" for one in ("q_norm", "k_norm")),
            *(f"mlp.{one}" for one in ("gate_proj", "up_proj", "down_proj")),
        )
    }
    fused = {name: part.parameter for name, part in parts.items() if "layernorm" in name}
    assert fused == {
        f"{stem}.input_layernorm.weight": "decoder.layers.0.self_attention.linear_qkv"
        ".layer_norm_weight",
        f"{stem}.post_attention_layernorm.weight": "decoder.layers.0.mlp.linear_fc1"
        ".layer_norm_weight",
    }
