"""Megatron's model against Hugging Face's on the same weights, in both directions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ledger.errors import InvalidArgument, NotFound
from tests.trainer.megatron_models import DENSE, KINDS, MOE, VOCAB, Tiny, random_tokens
from trainer.settings import ParallelSettings

Models = Callable[[str], Tiny]


def build(tiny: Tiny, *, trainable: bool = False) -> Any:
    from trainer.model import build_model, read_config
    from trainer.weights import import_weights, read_safetensors

    model = build_model(read_config(tiny.folder), ParallelSettings(), trainable=trainable)
    import_weights(model, read_safetensors(tiny.folder))
    return model


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int32)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_agree_with_hugging_face(tiny: Models, kind: str) -> None:
    from trainer.forward import logits_of

    model, tokens = build(tiny(kind)), random_tokens(5, 23)
    with torch.no_grad():
        ours, theirs = logits_of(model, tokens), tiny(kind).model(tokens).logits
    largest = float((ours - theirs).abs().max())
    print(f"{kind}: largest difference of logits to transformers (eager, fp32): {largest:.2e}")
    assert largest <= 1e-5
    if kind in DENSE:
        assert torch.equal(bits(ours), bits(theirs))


@pytest.mark.parametrize("kind", DENSE)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_of_dense_models_are_bitwise_those_of_hugging_face(
    tiny: Models, kind: str, temperature: float
) -> None:
    from trainer.model import token_log_probs

    model, tokens = build(tiny(kind)), random_tokens(4, 19)
    with torch.no_grad():
        ours, _ = token_log_probs(model, tokens, temperature=temperature)
        logits = tiny(kind).model(tokens).logits[:, :-1]
        theirs = torch.log_softmax(logits / temperature, dim=-1)
        theirs = theirs.gather(-1, tokens[:, 1:, None]).squeeze(-1)
    assert ours.dtype == torch.float32
    assert torch.equal(bits(ours), bits(theirs))


@pytest.mark.parametrize("kind", KINDS)
def test_weights_go_to_megatron_and_back_bit_for_bit(
    tiny: Models, kind: str, tmp_path: Path
) -> None:
    import transformers

    from trainer.model import read_config
    from trainer.weights import export_weights, read_safetensors, write_safetensors

    stored = read_safetensors(tiny(kind).folder)
    exported = dict(export_weights(build(tiny(kind))))
    assert list(exported) == sorted(stored)
    for name, tensor in stored.items():
        assert exported[name].is_contiguous()
        assert torch.equal(bits(exported[name]), bits(tensor)), name
    write_safetensors(tmp_path, exported.items(), read_config(tiny(kind).folder))
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    tokens = random_tokens(2, 9)
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, tiny(kind).model(tokens).logits)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_agree_with_hugging_face(tiny: Models, kind: str) -> None:
    from trainer.model import token_log_probs
    from trainer.weights import parts_of

    ours, theirs, tokens = build(tiny(kind), trainable=True), tiny(kind).model, random_tokens(3, 11)
    log_probs, _ = token_log_probs(ours, tokens, temperature=1.0, free_routing=kind in MOE)
    (-log_probs.sum()).backward()
    theirs.zero_grad()
    logits = theirs(tokens).logits[:, :-1].log_softmax(-1)
    (-logits.gather(-1, tokens[:, 1:, None]).sum()).backward()
    parameters = dict(ours.named_parameters())
    stored = dict(theirs.named_parameters())
    compared = 0
    for part in parts_of(ours):
        if part.name not in stored:
            continue  # transformers keeps the experts of a layer in one tensor
        gradient = part.take(parameters[part.parameter].grad)
        assert torch.allclose(gradient, stored[part.name].grad, rtol=1e-4, atol=1e-4), part.name
        compared += 1
    assert compared >= 15


def test_padding_and_neighbours_reach_no_real_token(tiny: Models) -> None:
    from trainer.model import token_log_probs

    model, tokens = build(tiny("llama")), random_tokens(3, 16)
    other = tokens.clone()
    other[:, 10:] = 5
    with torch.no_grad():
        ours, _ = token_log_probs(model, tokens, temperature=1.0)
        padded, _ = token_log_probs(model, other, temperature=1.0)
    assert torch.equal(bits(ours[:, :9]), bits(padded[:, :9]))
    assert not torch.equal(ours[:, 9:], padded[:, 9:])


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_leaving_out_columns_keeps_the_bits_of_the_others(
    tiny: Models, kind: str, temperature: float
) -> None:
    from trainer.forward import log_probs_at, logits_of
    from trainer.microbatch import MicroBatch
    from trainer.model import token_log_probs

    model, tokens = build(tiny(kind)), random_tokens(3, 17)
    options: dict[str, Any] = {"temperature": temperature, "want_entropy": True}
    columns = np.array([[7, 8, 15], [0, 3, 4], [15, 9, 2]]) + 17 * np.arange(3)[:, None]
    micro = MicroBatch(
        number=0,
        samples=slice(0, 3),
        responses=slice(0, 9),
        tokens_BT=tokens.numpy(),
        positions_BT=np.tile(np.arange(17), (3, 1)),
        sequence_starts=None,
        columns_n=columns.reshape(-1),
        targets_n=tokens.reshape(-1).numpy()[columns.reshape(-1) + 1],
        sample_n=np.repeat(np.arange(3), 3),
        temperatures_n=np.full(9, temperature),
        kept_sets=None,
        expert_ids=None,
    )
    with torch.no_grad():
        whole, entropy = token_log_probs(model, tokens, free_routing=kind in MOE, **options)
        part, part_entropy = log_probs_at(logits_of(model, tokens), micro, want_entropy=True)
    places = torch.from_numpy(columns - np.arange(3)[:, None]).reshape(-1)  # rows of 16 columns
    assert torch.equal(bits(part), bits(whole.reshape(-1)[places]))
    assert entropy is not None
    assert part_entropy is not None
    assert torch.equal(bits(part_entropy), bits(entropy.reshape(-1)[places]))


def test_the_entropy_is_that_of_the_distribution(tiny: Models) -> None:
    from trainer.forward import logits_of
    from trainer.model import token_log_probs

    model, tokens = build(tiny("qwen3")), random_tokens(2, 8)
    with torch.no_grad():
        _, entropy = token_log_probs(model, tokens, temperature=0.5, want_entropy=True)
        expected = torch.distributions.Categorical(logits=logits_of(model, tokens) / 0.5).entropy()
    assert entropy is not None
    torch.testing.assert_close(entropy, expected[:, :-1], rtol=1e-5, atol=1e-5)


def test_a_frozen_model_has_no_gradients(tiny: Models) -> None:
    from trainer.model import token_log_probs

    model = build(tiny("llama"))
    log_probs, _ = token_log_probs(model, random_tokens(2, 5), temperature=1.0)
    assert not log_probs.requires_grad
    assert not model.training


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "LlamaForCausalLM, Qwen2ForCausalLM"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "yarn"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
    ],
)
def test_what_cannot_be_built_is_refused(
    tiny: Models, change: dict[str, Any], message: str
) -> None:
    from trainer.model import build_model, read_config

    config = {**read_config(tiny("llama").folder), **change}
    with pytest.raises(InvalidArgument, match=message):
        build_model(config, ParallelSettings(), trainable=False)


def test_weights_that_do_not_fit_are_refused_before_anything_is_copied(tiny: Models) -> None:
    from trainer.weights import export_weights, import_weights, read_safetensors

    model, stored = build(tiny("llama")), read_safetensors(tiny("llama").folder)
    before = {name: tensor.clone() for name, tensor in export_weights(model)}
    name = "model.layers.1.self_attn.k_proj.weight"
    changed = {key: tensor + 1 for key, tensor in stored.items()}
    for broken, message in (
        ({key: t for key, t in changed.items() if key != name}, f"missing: {name}"),
        ({**changed, "model.extra": torch.zeros(1)}, "unknown: model.extra"),
        ({**changed, name: changed[name][:-1]}, r"31, 96"),
        ({**changed, name: changed[name].double()}, "float64"),
        ({**changed, "lm_head.weight": torch.zeros(VOCAB, 96)}, "ties"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            import_weights(model, broken)
    for key, tensor in export_weights(model):
        assert torch.equal(tensor, before[key])
    import_weights(model, {**stored, "lm_head.weight": stored["model.embed_tokens.weight"]})


def test_a_missing_model_folder_is_named(tmp_path: Path) -> None:
    from trainer.model import read_config
    from trainer.weights import read_safetensors

    for read in (read_config, read_safetensors):
        with pytest.raises(NotFound, match=str(tmp_path)):
            read(tmp_path)


def test_impossible_arguments_are_refused(tiny: Models) -> None:
    from trainer.model import token_log_probs

    model, tokens = build(tiny("llama")), random_tokens(2, 6)
    ids = torch.zeros(2, 5, 2, 2, dtype=torch.int64)
    for wrong, message in (
        ({"temperature": 0.0}, "temperature"),
        ({"temperature": 1.0, "expert_ids": ids}, "dense model"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            token_log_probs(model, tokens, **wrong)
    with pytest.raises(InvalidArgument, match=r"\[0, 97\)"):
        token_log_probs(model, tokens + VOCAB, temperature=1.0)
    with pytest.raises(InvalidArgument, match="int64"):
        token_log_probs(model, tokens.int(), temperature=1.0)
