"""Every architecture against transformers on the same weights, in both directions."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ledger.errors import InvalidArgument
from tests.trainer.megatron_models import NEWER, NEWER_DENSE, NEWER_MOE, Tiny, random_tokens
from tests.trainer.test_megatron_model import bits, build
from tests.trainer.test_megatron_state import fresh, step
from trainer.settings import OptimizerSettings, ParallelSettings

Models = Callable[[str], Tiny]


@pytest.mark.parametrize("kind", NEWER)
def test_logits_agree_with_hugging_face(tiny: Models, kind: str) -> None:
    from trainer.forward import logits_of

    model, tokens = build(tiny(kind)), random_tokens(5, 23)
    with torch.no_grad():
        ours, theirs = logits_of(model, tokens), tiny(kind).model(tokens).logits
    largest = float((ours - theirs).abs().max())
    print(f"{kind}: largest difference of logits to transformers (eager, fp32): {largest:.2e}")
    assert largest <= 1e-5
    if kind in NEWER_DENSE:
        assert torch.equal(bits(ours), bits(theirs))


@pytest.mark.parametrize("kind", NEWER)
def test_exported_weights_are_the_imported_bits_and_load_into_transformers(
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


@pytest.mark.parametrize("kind", NEWER)
def test_gradients_agree_with_hugging_face(tiny: Models, kind: str) -> None:
    from trainer.model import token_log_probs
    from trainer.weights import parts_of, tensors_of

    ours, theirs, tokens = build(tiny(kind), trainable=True), tiny(kind).model, random_tokens(3, 11)
    log_probs, _ = token_log_probs(ours, tokens, temperature=1.0, free_routing=kind in NEWER_MOE)
    (-log_probs.sum()).backward()
    theirs.zero_grad()
    logits = theirs(tokens).logits[:, :-1].log_softmax(-1)
    (-logits.gather(-1, tokens[:, 1:, None]).sum()).backward()
    tensors, stored = tensors_of(ours), dict(theirs.named_parameters())
    compared = 0
    for part in parts_of(ours):
        if part.name in stored:  # transformers keeps the experts of a layer in one tensor
            gradient = part.take(tensors[part.parameter].grad)
            expected = stored[part.name].grad
            assert torch.allclose(gradient, expected, rtol=1e-4, atol=1e-4), part.name
            compared += 1
    assert compared >= 15


def routers_of(model: Any) -> list[Any]:
    return [layer.mlp.router for layer in model.decoder.layers if hasattr(layer.mlp, "router")]


@pytest.mark.parametrize("kind", NEWER_MOE)
def test_free_routing_chooses_what_hugging_face_chooses(tiny: Models, kind: str) -> None:
    from trainer.model import recorded_routing

    tokens, chosen = random_tokens(3, 14), []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda _m, _i, out: chosen.append(out[2]))
        for layer in tiny(kind).model.model.layers
        if hasattr(layer.mlp, "gate")
    ]
    with torch.no_grad():
        tiny(kind).model(tokens)
    for hook in hooks:
        hook.remove()
    theirs = torch.stack([ids.view(3, 14, -1)[:, :-1] for ids in chosen], dim=2)
    ours = recorded_routing(build(tiny(kind)), tokens)
    assert ours.shape == theirs.shape
    assert torch.equal(ours.sort(-1).values, theirs.sort(-1).values)


@pytest.mark.parametrize("kind", NEWER_MOE)
def test_replayed_gate_weights_are_the_routers_scores_of_the_recorded_experts(
    tiny: Models, kind: str
) -> None:
    """After the router changed: its own score function over the recorded ids, without the bias."""
    from trainer.model import recorded_routing, token_log_probs

    model, tokens = build(tiny(kind)), random_tokens(3, 14)
    ids = recorded_routing(model, tokens)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for router in routers_of(model):
            router.weight.copy_(torch.randn(router.weight.shape, generator=generator))
    assert not torch.equal(recorded_routing(model, tokens).sort(-1).values, ids.sort(-1).values)
    seen: list[Any] = []
    hooks = [
        router.register_forward_hook(lambda m, i, out: seen.append((m, i[0], *out)))
        for router in routers_of(model)
    ]
    with torch.no_grad():
        replayed, _ = token_log_probs(model, tokens, temperature=1.0, expert_ids=ids)
    for hook in hooks:
        hook.remove()
    for layer, (router, hidden, weights, chosen) in enumerate(seen):
        logits = (hidden @ router.weight.t()).view(14, 3, 8)[:-1]
        at = ids[:, :, layer].transpose(0, 1)
        if kind == "qwen3_moe_sparse":
            expected = logits.softmax(-1).gather(-1, at)
        else:
            scores = logits.sigmoid().gather(-1, at)
            expected = scores / scores.sum(-1, keepdim=True) * 2.5
        found = weights.view(14, 3, 8)[:-1]
        torch.testing.assert_close(found.gather(-1, at), expected, rtol=1e-5, atol=1e-6)
        real = chosen.view(14, 3, 8)[:-1]
        assert torch.equal(real, torch.zeros_like(real).scatter(-1, at, True))
    if kind == "qwen3_moe_sparse":
        return
    for router in routers_of(model):
        router.expert_bias.uniform_(-9.0, 9.0, generator=generator)
    with torch.no_grad():
        again, _ = token_log_probs(model, tokens, temperature=1.0, expert_ids=ids)
    assert torch.equal(bits(again), bits(replayed))
    assert not torch.equal(recorded_routing(model, tokens).sort(-1).values, ids.sort(-1).values)


@pytest.mark.parametrize("kind", ["glm4", "deepseek_v3"])
def test_steps_and_checkpoints_keep_every_bit(tiny: Models, kind: str, tmp_path: Path) -> None:
    from trainer.checkpoint import load_checkpoint, save_checkpoint

    moe = kind in NEWER_MOE
    state = fresh(tiny(kind))
    before = {name: tensor.clone() for name, tensor in state.export_weights()}
    step(state, seed=0, moe=moe)
    for name, tensor in state.export_weights():
        kept = name.endswith("e_score_correction_bias")
        assert torch.equal(tensor, before[name]) is kept, name
    gradients = {record.name for record in state.gradient_records()}
    assert before.keys() - gradients == {n for n in before if n.endswith("correction_bias")}
    saved = save_checkpoint(state, tmp_path / "v1", model_dir=tiny(kind).folder)
    other = fresh(tiny(kind), seed=9)
    with torch.no_grad():
        for router in routers_of(other.model):
            router.expert_bias.zero_()
    load_checkpoint(other, saved.directory)
    assert other.tensor_records() == state.tensor_records()
    assert step(other, seed=1, moe=moe) == step(state, seed=1, moe=moe)


def test_the_bias_moves_where_a_rate_is_asked_for(tiny: Models) -> None:
    """Megatron's own rule (arXiv 2408.15664): by the rate, towards experts with too few tokens."""
    from trainer.state import create_state

    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    layout = ParallelSettings(megatron={"moe_router_bias_update_rate": 0.25})
    state = create_state(tiny("deepseek_v3").folder, layout, OptimizerSettings(lr=1e-3), seed=1)
    before = dict(state.export_weights())[name].clone()
    step(state, seed=0, moe=True)
    moved = dict(state.export_weights())[name] - before
    assert set(moved.abs().round(decimals=4).tolist()) <= {0.0, 0.25}
    assert moved.max() > 0 > moved.min()


def test_layers_of_multi_token_prediction_are_left_out(tiny: Models) -> None:
    from trainer.weights import export_weights, import_weights, read_safetensors

    stored = read_safetensors(tiny("glm4_moe").folder)
    model = build(tiny("glm4_moe"))
    import_weights(model, {**stored, "model.layers.3.eh_proj.weight": torch.zeros(48, 96)})
    assert [name for name, _ in export_weights(model)] == sorted(stored)
    with pytest.raises(InvalidArgument, match=r"unknown: model\.layers\.4\.eh_proj"):
        import_weights(model, {**stored, "model.layers.4.eh_proj.weight": torch.zeros(48, 96)})


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("llama3_rope", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_type"),
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window"),
        ("qwen2", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ("qwen2", {"quantization_config": {"quant_method": "fp8"}}, "dequantise"),
        ("qwen2", {"num_key_value_heads": 3}, "a divisor of 4"),
        ("qwen3_moe_sparse", {"decoder_sparse_step": 4}, "layers with experts"),
        ("glm4_moe", {"norm_topk_prob": False}, "norm_topk_prob"),
        ("glm4_moe", {"num_experts_per_tok": 9}, "num_experts_per_tok|n_group"),
        ("glm4_moe", {"n_shared_experts": 0}, "n_shared_experts"),
        ("glm4_moe", {"first_k_dense_replace": None}, "first_k_dense_replace"),
        ("glm4", {"partial_rotary_factor": 1.5, "rope_parameters": None}, "at most 1"),
        ("deepseek_v3", {"attention_bias": True}, "attention_bias"),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave"),
        ("deepseek_v3", {"topk_group": 3}, "two best experts"),
        ("deepseek_v3", {"n_group": 3}, "equal groups"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func"),
        ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads"),
    ],
)
def test_what_cannot_be_built_is_refused(
    tiny: Models, kind: str, change: dict[str, Any], message: str
) -> None:
    from trainer.architecture import read_architecture
    from trainer.model import read_config

    config = read_config(tiny(kind).folder)
    read_architecture(config)
    if "rope_scaling" in change:
        config.pop("rope_parameters")
        config["rope_theta"] = 10000.0
    with pytest.raises(InvalidArgument, match=message):
        read_architecture({**config, **change})


_HUB: dict[str, Any] = {
    "hidden_act": "silu",
    "vocab_size": 32,
    "rms_norm_eps": 1e-5,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "attention_dropout": 0.0,
}
_DEEPSEEK_HUB: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "v_head_dim": 128,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "num_key_value_heads": 4,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 1,
    "rope_theta": 10000,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
}


def test_configurations_of_the_model_hub_are_understood() -> None:
    """Before transformers 5 rotary keys stood elsewhere; values as published, sizes smaller."""
    from trainer.architecture import read_architecture
    from trainer.rotary import Llama3Scaling, YarnScaling

    glm = read_architecture(
        {
            **_HUB,
            "architectures": ["Glm4ForCausalLM"],
            "attention_bias": False,
            "head_dim": 128,
            "num_key_value_heads": 2,
            "partial_rotary_factor": 0.5,
            "rope_theta": 10000.0,
        }
    )
    assert (glm.rotary.fraction, glm.rotary.interleaved, glm.qkv_bias) == (0.5, True, False)
    scaling = {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    }
    llama = read_architecture(
        {
            **_HUB,
            "architectures": ["LlamaForCausalLM"],
            "rope_scaling": scaling,
            "rope_theta": 500000.0,
        }
    )
    assert llama.rotary.scaling == Llama3Scaling(factor=32.0)
    deepseek = read_architecture({**_HUB, **_DEEPSEEK_HUB})
    assert isinstance(deepseek.rotary.scaling, YarnScaling)
    assert deepseek.experts is not None
    assert deepseek.experts.layers == (False, False, False, True)
    assert (deepseek.experts.groups, deepseek.experts.group_topk) == (8, 4)
    assert deepseek.prediction_layers == 1


@pytest.mark.parametrize("kind", ["llama3_rope", "glm4", "deepseek_v3_yarn"])
def test_a_sequence_has_the_same_logits_packed_among_others(tiny: Models, kind: str) -> None:
    from trainer.forward import logits_of
    from trainer.packed_attention import packed_sequences

    model, tokens = build(tiny(kind)), random_tokens(1, 21)
    starts = [0, 4, 15, 21]
    positions = torch.cat(
        [torch.arange(stop - start) for start, stop in itertools.pairwise(starts)]
    )
    packed = packed_sequences(torch.tensor(starts, dtype=torch.int32))
    with torch.no_grad():
        together = model(tokens, positions[None], None, packed_seq_params=packed)[0]
        for start, stop in itertools.pairwise(starts):
            alone = logits_of(model, tokens[:, start:stop])[0]
            torch.testing.assert_close(together[start:stop], alone, rtol=0, atol=1e-5)


def test_in_bfloat16_the_bias_of_the_router_stays_float32(tiny: Models) -> None:
    from trainer.model import build_model, read_config, token_log_probs
    from trainer.state import load_weights
    from trainer.weights import export_weights, read_safetensors

    folder, tokens = tiny("glm4_moe").folder, random_tokens(2, 9)
    model = build_model(read_config(folder), ParallelSettings(bf16=True), trainable=False)
    load_weights(model, folder)
    stored = read_safetensors(folder)
    for _ in range(2):
        for name, tensor in export_weights(model):
            wide = name.endswith("e_score_correction_bias")
            assert tensor.dtype == (torch.float32 if wide else torch.bfloat16), name
            assert torch.equal(tensor, stored[name].to(tensor.dtype)), name
        with torch.no_grad():  # Megatron widens it in its first forward, if nobody did before
            log_probs, _ = token_log_probs(model, tokens, temperature=1.0, free_routing=True)
    assert log_probs.dtype == torch.float32
    assert bool(log_probs.isfinite().all())
