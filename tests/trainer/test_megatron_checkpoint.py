"""Checkpoints restore the exact state, appear whole or not at all, and notice a changed bit."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ledger.errors import AlreadyExists, Corrupt, IncompatibleFormat, NotFound, StorageFailed
from tests.trainer.megatron_models import MOE, Tiny, random_tokens
from tests.trainer.test_megatron_state import fresh, step

Models = Callable[[str], Tiny]


@pytest.fixture
def saved(tiny: Models, tmp_path: Path) -> tuple[Any, Any, dict[str, Any]]:
    """A dense state after two steps, its checkpoint, and what a ledger would expect of it."""
    return save(tiny("llama"), tmp_path / "v2")


def save(tiny: Tiny, directory: Path) -> tuple[Any, Any, dict[str, Any]]:
    from trainer.checkpoint import save_checkpoint

    state = fresh(tiny, lr_warmup_iters=4)
    for i in range(2):
        step(state, seed=i, moe=tiny.kind in MOE)
    checkpoint = save_checkpoint(state, directory, model_dir=tiny.folder)
    return state, checkpoint, expectations(state, checkpoint)


def expectations(state: Any, checkpoint: Any) -> dict[str, Any]:
    return {
        "expected_records": state.tensor_records(),
        "expected_files": dict(zip(checkpoint.files, checkpoint.file_hashes, strict=True)),
        "expected_optimizer_digest": checkpoint.optimizer_digest,
        "expected_random_state_digest": checkpoint.random_state_digest,
        "version": 2,
    }


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_a_restored_state_goes_on_bit_for_bit(tiny: Models, kind: str, tmp_path: Path) -> None:
    from trainer.checkpoint import load_checkpoint

    state, checkpoint, expected = save(tiny(kind), tmp_path / "v2")
    uninterrupted = [step(state, seed=i, moe=kind in MOE) for i in range(2, 5)]
    other = fresh(tiny(kind), seed=99, lr_warmup_iters=4)
    step(other, seed=7, moe=kind in MOE)
    load_checkpoint(other, checkpoint.directory, **expected)
    assert other.optimizer_digest() == checkpoint.optimizer_digest
    assert other.random_state_digest() == checkpoint.random_state_digest
    assert [step(other, seed=i, moe=kind in MOE) for i in range(2, 5)] == uninterrupted


def test_the_state_before_the_first_step_is_restored_too(tiny: Models, tmp_path: Path) -> None:
    from trainer.checkpoint import load_checkpoint, save_checkpoint

    state = fresh(tiny("llama"))
    checkpoint = save_checkpoint(state, tmp_path / "v0", model_dir=tiny("llama").folder)
    uninterrupted = step(state, seed=0, moe=False)
    other = fresh(tiny("llama"), seed=5)
    step(other, seed=3, moe=False)
    load_checkpoint(other, checkpoint.directory)
    assert step(other, seed=0, moe=False) == uninterrupted


def test_a_branch_may_go_on_with_another_rate(saved: Any, tiny: Models) -> None:
    from trainer.checkpoint import load_checkpoint

    _, checkpoint, expected = saved
    other = fresh(tiny("llama"), lr=5e-4)
    load_checkpoint(other, checkpoint.directory, **expected)
    assert other.learning_rate == 5e-4
    assert other.steps == other.adam_step() == 2


def test_transformers_loads_the_folder(saved: Any) -> None:
    import transformers

    from trainer.forward import logits_of

    state, checkpoint, _ = saved
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint.directory, attn_implementation="eager"
    )
    tokens = random_tokens(2, 8)
    with torch.no_grad():
        assert torch.equal(theirs(tokens).logits, logits_of(state.model, tokens))


def test_saving_again_changes_nothing_and_another_state_is_refused(
    saved: Any, tiny: Models
) -> None:
    from trainer.checkpoint import save_checkpoint

    state, checkpoint, _ = saved
    before = {path.name: path.stat().st_mtime_ns for path in checkpoint.directory.iterdir()}
    again = save_checkpoint(state, checkpoint.directory, model_dir=tiny("llama").folder)
    assert (again.files, again.file_hashes) == (checkpoint.files, checkpoint.file_hashes)
    assert before == {p.name: p.stat().st_mtime_ns for p in checkpoint.directory.iterdir()}
    step(state, seed=5, moe=False)
    with pytest.raises(AlreadyExists, match="weights_root"):
        save_checkpoint(state, checkpoint.directory, model_dir=tiny("llama").folder)
    assert [path.name for path in checkpoint.directory.parent.iterdir()] == ["v2"]


def test_the_bytes_of_a_checkpoint_are_a_function_of_the_state(
    saved: Any, tiny: Models, tmp_path: Path
) -> None:
    from trainer.checkpoint import save_checkpoint

    state, checkpoint, _ = saved
    twin = save_checkpoint(state, tmp_path / "twin", model_dir=tiny("llama").folder)
    assert (twin.files, twin.file_hashes) == (checkpoint.files, checkpoint.file_hashes)


@pytest.mark.parametrize("fails_at", ["fsync", "rename"])
def test_a_save_that_dies_leaves_nothing_under_the_name(
    saved: Any, tiny: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_at: str
) -> None:
    from trainer.checkpoint import save_checkpoint

    state, _, _ = saved

    def broken(*args: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, fails_at, broken)
        with pytest.raises(StorageFailed, match="No space"):
            save_checkpoint(state, tmp_path / "v3", model_dir=tiny("llama").folder)
    assert [path.name for path in tmp_path.iterdir()] == ["v2"]
    save_checkpoint(state, tmp_path / "v3", model_dir=tiny("llama").folder)


def change_one_weight(folder: Path, name: str) -> None:
    """Move one weight by one unit in the last place."""
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors[name].view(torch.int32).view(-1)[5] += 1
    save_file(tensors, path, metadata={"format": "pt"})


def checksum(records: Any, name: str) -> str:
    return next(record.checksum.hex() for record in records if record.name == name)


@pytest.mark.parametrize("file_hashes_known", [True, False])
def test_one_weight_changed_by_one_ulp_is_named(
    saved: Any, tiny: Models, file_hashes_known: bool
) -> None:
    from safetensors.torch import load_file

    from trainer.checkpoint import load_checkpoint
    from trainer.digests import records_of

    state, checkpoint, expected = saved
    name = "model.layers.1.self_attn.v_proj.weight"
    change_one_weight(checkpoint.directory, name)
    if not file_hashes_known:
        # As when the manifest was written anew along with the weights.
        del expected["expected_files"]
        repair_manifest(checkpoint.directory)
    changed = records_of(load_file(checkpoint.directory / "model.safetensors").items())
    other = fresh(tiny("llama"), seed=5)
    before = other.tensor_records()
    with pytest.raises(Corrupt) as caught:
        load_checkpoint(other, checkpoint.directory, **expected)
    for part in ("version 2", "model.safetensors", name):
        assert part in str(caught.value)
    assert checksum(state.tensor_records(), name) in str(caught.value)
    assert checksum(changed, name) in str(caught.value)
    assert other.tensor_records() == before


def repair_manifest(folder: Path) -> None:
    import json

    from trainer.checkpoint_files import file_hash

    path = folder / "trainer_state.json"
    manifest = json.loads(path.read_text())
    manifest["files"]["model.safetensors"]["blake3"] = file_hash(folder / "model.safetensors").hex()
    path.write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    "name", ["optimizer.safetensors", "random_state.safetensors", "config.json"]
)
def test_one_byte_of_any_file_is_noticed(saved: Any, tiny: Models, name: str) -> None:
    from trainer.checkpoint import load_checkpoint, save_checkpoint

    state, checkpoint, expected = saved
    path = checkpoint.directory / name
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    with pytest.raises(Corrupt, match=name) as caught:
        load_checkpoint(fresh(tiny("llama")), checkpoint.directory, **expected)
    if name == "optimizer.safetensors":
        assert "exp_avg" in str(caught.value)
    with pytest.raises(Corrupt, match=name):
        save_checkpoint(state, checkpoint.directory, model_dir=tiny("llama").folder)


@pytest.mark.parametrize("key", ["expected_optimizer_digest", "expected_random_state_digest"])
def test_a_checkpoint_of_another_version_is_noticed(saved: Any, tiny: Models, key: str) -> None:
    from trainer.checkpoint import load_checkpoint

    _, checkpoint, expected = saved
    with pytest.raises(Corrupt, match="digest"):
        load_checkpoint(fresh(tiny("llama")), checkpoint.directory, **{**expected, key: bytes(32)})


def test_what_is_missing_is_named(saved: Any, tiny: Models, tmp_path: Path) -> None:
    from trainer.checkpoint import load_checkpoint

    _, checkpoint, expected = saved
    state = fresh(tiny("llama"))
    with pytest.raises(NotFound, match="version 2"):
        load_checkpoint(state, tmp_path / "gone", **expected)
    (checkpoint.directory / "optimizer.safetensors").unlink()
    with pytest.raises(NotFound, match=r"optimizer\.safetensors"):
        load_checkpoint(state, checkpoint.directory, **expected)
    shutil.rmtree(checkpoint.directory)
    with pytest.raises(NotFound, match="no such folder"):
        load_checkpoint(state, checkpoint.directory, **expected)


def test_another_format_is_refused(saved: Any, tiny: Models) -> None:
    from trainer.checkpoint import load_checkpoint

    _, checkpoint, _ = saved
    path = checkpoint.directory / "trainer_state.json"
    path.write_text(path.read_text().replace("hf-safetensors-1", "hf-safetensors-9"))
    with pytest.raises(IncompatibleFormat, match="hf-safetensors-9"):
        load_checkpoint(fresh(tiny("llama")), checkpoint.directory)
