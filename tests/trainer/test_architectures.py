"""Every architecture against transformers on the same weights, in both directions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.trainer.megatron_models import NEWER, NEWER_DENSE, Tiny, random_tokens
from tests.trainer.test_megatron_model import bits, build

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
