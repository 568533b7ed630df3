"""Model folders in one file and in shards: as transformers writes and reads them."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ledger.errors import Corrupt, InvalidArgument, NotFound
from tests.trainer.megatron_models import Tiny, random_tokens
from trainer.weights.files import INDEX_FILE, WEIGHTS_FILE, read_safetensors
from trainer.weights.handles import open_files
from trainer.weights.shards import finish_shards, write_safetensors, write_shards

Models = Callable[[str], Tiny]
LIMIT = 30_000


def test_shards_and_index_are_the_bytes_that_transformers_writes(
    tiny: Models, tmp_path: Path
) -> None:
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    tiny("glm4").model.save_pretrained(theirs, max_shard_size=LIMIT)
    ours.mkdir()
    config = json.loads((theirs / "config.json").read_text())
    named = tiny("glm4").model.state_dict().items()
    written = write_safetensors(ours, named, config, max_shard_size=LIMIT)
    names = {path.name for path in theirs.iterdir()} - {"generation_config.json"}
    assert {path.name for path in written} == {path.name for path in ours.iterdir()} == names
    assert len(names) == 10
    for name in names:
        assert (ours / name).read_bytes() == (theirs / name).read_bytes(), name


def test_transformers_loads_shards_of_a_mixture_of_experts(tiny: Models, tmp_path: Path) -> None:
    import transformers

    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    tiny("deepseek_v3").model.save_pretrained(theirs, max_shard_size=LIMIT)
    ours.mkdir()
    stored = read_safetensors(theirs)
    config = json.loads((theirs / "config.json").read_text())
    write_safetensors(ours, sorted(stored.items()), config, max_shard_size=LIMIT)
    index, their_index = (json.loads((d / INDEX_FILE).read_text()) for d in (ours, theirs))
    assert index["metadata"] == their_index["metadata"]
    assert index["weight_map"].keys() == their_index["weight_map"].keys()
    again = transformers.AutoModelForCausalLM.from_pretrained(ours, attn_implementation="eager")
    tokens = random_tokens(2, 7)
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, tiny("deepseek_v3").model(tokens).logits)
    read, handles = read_safetensors(ours), open_files(ours)
    assert read.keys() == handles.keys() == stored.keys()
    for name, tensor in stored.items():
        assert torch.equal(read[name], tensor)
        assert torch.equal(handles[name][:1], tensor[:1])


def test_no_more_than_a_shard_is_held(tmp_path: Path) -> None:
    alive: list[Any] = []

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(40):
            tensor = torch.full((25,), float(number))
            alive.append(weakref.ref(tensor))
            # What is held: a shard of 4 tensors at most, and the one that opens the next.
            assert sum(one() is not None for one in alive) <= 5
            yield f"t{number:02d}", tensor

    written = write_safetensors(tmp_path, tensors(), {}, max_shard_size=400)
    assert len(written) == 12
    assert read_safetensors(tmp_path)["t39"].tolist() == [39.0] * 25


def test_every_bit_comes_back(tmp_path: Path) -> None:
    bits = torch.tensor([0x7FC00001, -(2**31), 0x7F800000, 1], dtype=torch.int32)
    named = {"b": bits.view(torch.float32), "a": torch.tensor([1.5, -0.0], dtype=torch.bfloat16)}
    named["b"] = torch.cat([named["b"], torch.zeros(1)])
    bits = torch.cat([bits, torch.zeros(1, dtype=torch.int32)])
    written = write_safetensors(tmp_path, named.items(), {"x": 1}, max_shard_size=5)
    assert [path.name for path in written] == [
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        INDEX_FILE,
    ]
    found = read_safetensors(tmp_path)
    assert torch.equal(found["b"].view(torch.int32), bits)
    assert torch.equal(found["a"].view(torch.int16), named["a"].view(torch.int16))
    metadata = json.loads((tmp_path / INDEX_FILE).read_text())["metadata"]
    assert metadata == {"total_parameters": 7, "total_size": 24}


def test_weights_of_before_are_removed(tmp_path: Path) -> None:
    one, two = {"a": torch.zeros(2)}, {"a": torch.ones(2), "b": torch.ones(2)}
    write_safetensors(tmp_path, one.items(), {})
    (tmp_path / "tokenizer.json").write_text("{}")
    write_safetensors(tmp_path, two.items(), {}, max_shard_size=8)
    assert not (tmp_path / WEIGHTS_FILE).exists()
    assert read_safetensors(tmp_path)["a"].tolist() == [1.0, 1.0]
    write_safetensors(tmp_path, one.items(), {})
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"config.json", WEIGHTS_FILE, "tokenizer.json"}


def test_the_configuration_says_the_dtype_that_was_written(tmp_path: Path) -> None:
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    config = {"dtype": "bfloat16", "hidden_size": 2}
    write_safetensors(tmp_path, {"a": torch.zeros(2), bias: torch.zeros(2)}.items(), config)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "float32"
    half = {"a": torch.zeros(2, dtype=torch.bfloat16), bias: torch.zeros(2)}
    write_safetensors(tmp_path, half.items(), {**config, "dtype": "float32"})
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    assert config["dtype"] == "bfloat16"


def test_what_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="max_shard_size"):
        write_safetensors(tmp_path, [], {}, max_shard_size=0)
    with pytest.raises(InvalidArgument, match="no tensor"):
        write_safetensors(tmp_path, [], {})
    shards = [*write_shards(tmp_path, [("a", torch.zeros(1))])]
    shards += write_shards(tmp_path, [("a", torch.zeros(1))], writer=1)
    with pytest.raises(InvalidArgument, match="a twice"):
        finish_shards(tmp_path, shards, {})


def test_folders_whose_index_is_wrong_are_refused(tmp_path: Path) -> None:
    two = {"a": torch.ones(2), "b": torch.ones(2)}
    write_safetensors(tmp_path, two.items(), {}, max_shard_size=8)
    index = tmp_path / INDEX_FILE
    right = json.loads(index.read_text())
    first = tmp_path / "model-00001-of-00002.safetensors"
    for weight_map, message in (
        ({**right["weight_map"], "c": first.name}, "tensor c"),
        ({**right["weight_map"], "b": first.name}, "tensor b"),
        ({**right["weight_map"], "b": f"../{first.name}"}, "beside it"),
    ):
        index.write_text(json.dumps({"weight_map": weight_map}))
        for read in (read_safetensors, open_files):
            with pytest.raises(Corrupt, match=message):
                read(tmp_path)
    index.write_text(json.dumps(right))
    save_file(two, first)
    with pytest.raises(Corrupt, match="tensor b"):
        read_safetensors(tmp_path)
    first.write_bytes(first.read_bytes()[:-3])
    with pytest.raises(Corrupt, match="whole safetensors"):
        open_files(tmp_path)
    first.unlink()
    with pytest.raises(NotFound, match=first.name):
        open_files(tmp_path)
