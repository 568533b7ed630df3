"""Configurations and weight files that cannot be read by the trainer; no process groups."""

from __future__ import annotations

import json
import shutil

import pytest

from ledger.errors import Corrupt, InvalidArgument, NotFound
from trainer.architecture import read_architecture, read_config
from trainer.weights.files import read_safetensors


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        (b"{", Corrupt, "JSON"),
        (b"", Corrupt, "JSON"),
        (b"\xff\xfe{}", Corrupt, "UTF-8"),
        (b"[" * 100_000, Corrupt, "JSON"),
        (b"[]", Corrupt, "a JSON object"),
        (None, NotFound, "no config.json"),
    ],
)
def test_a_configuration_that_is_none(text, error, message, tmp_path):
    if text is not None:
        (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(error, match=message) as caught:
        read_config(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_a_folder_in_place_of_the_configuration(tmp_path):
    (tmp_path / "config.json").mkdir()
    with pytest.raises(NotFound, match="IsADirectoryError"):
        read_config(tmp_path)
    with pytest.raises(NotFound):
        read_config(tmp_path / "config.json" / "deeper")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"architectures": None}, "found:    nothing"),
        ({"architectures": []}, "LlamaForCausalLM"),
        ({"architectures": "LlamaForCausalLM"}, "a list"),
        ({"architectures": {"a": 1}}, "a list"),
        ({"architectures": [["LlamaForCausalLM"]]}, "a list"),
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"rms_norm_eps": None}, "rms_norm_eps"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
        ({"num_key_value_heads": "two"}, "num_key_value_heads"),
        ({"num_key_value_heads": -1}, "num_key_value_heads"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"head_dim": [16]}, "head_dim"),
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"rope_parameters": [1]}, "rope_parameters"),
        ({"rope_parameters": {"rope_theta": "far"}}, "rope_theta"),
        ({"rope_parameters": None, "rope_theta": None}, "rope_theta"),
    ],
)
def test_a_configuration_that_cannot_be_built_names_the_key(tiny_dense, changed, message):
    config = json.loads((tiny_dense / "config.json").read_text())
    read_architecture(config)
    with pytest.raises(InvalidArgument, match=message):
        read_architecture({**config, **changed})


def test_an_empty_configuration():
    with pytest.raises(InvalidArgument, match="LlamaForCausalLM"):
        read_architecture({})


@pytest.mark.parametrize("at", [0, 5, 400, -1])
def test_weights_that_are_cut_short(tiny_dense, tmp_path, at):
    path = tmp_path / "model.safetensors"
    path.write_bytes((tiny_dense / "model.safetensors").read_bytes()[:at])
    with pytest.raises(Corrupt, match=r"model\.safetensors"):
        read_safetensors(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "3", '{"weight_map": []}', "[" * 100_000])
def test_an_index_that_is_none(tmp_path, text):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(Corrupt, match="weight_map"):
        read_safetensors(tmp_path)


def test_weights_that_are_missing(tiny_dense, tmp_path):
    shutil.copy(tiny_dense / "config.json", tmp_path)
    with pytest.raises(NotFound, match=r"model\.safetensors"):
        read_safetensors(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "other"}}')
    with pytest.raises(NotFound, match="other"):
        read_safetensors(tmp_path)
