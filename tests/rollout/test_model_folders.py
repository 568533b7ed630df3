"""Model folders with something wrong: the engine opens them first, and says what it is."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ledger.errors import Corrupt, InvalidArgument, LedgerError, NotFound
from rollout.engines import create_engine

Damage = Callable[[Path], object]


def config(text: str) -> Damage:
    return lambda folder: (folder / "config.json").write_text(text)


def setting(**values: object) -> Damage:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        found = {**json.loads(path.read_text()), **values}
        path.write_text(json.dumps({k: v for k, v in found.items() if v is not None}))

    return change


def cut(at: int) -> Damage:
    def change(folder: Path) -> None:
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:at])

    return change


def without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def index(text: str) -> Damage:
    def change(folder: Path) -> None:
        without_weights(folder)
        (folder / "model.safetensors.index.json").write_text(text)

    return change


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (config("{"), Corrupt, "config.json"),
        (config(""), Corrupt, "a JSON object"),
        (config("\udcff".encode("utf-8", "replace").decode()), Corrupt, "a JSON object"),
        (config("[" * 100_000), Corrupt, "RecursionError"),
        (config("[]"), Corrupt, "a list"),
        (config("3"), Corrupt, "an? int"),
        (config("{}"), InvalidArgument, "model_type"),
        (config('{"architectures": ["GPT2LMHeadModel"]}'), InvalidArgument, "GPT2LMHeadModel"),
        (config('{"model_type": 3}'), InvalidArgument, "model_type"),
        (config('{"model_type": "no_such_model"}'), InvalidArgument, "no_such_model"),
        (config('{"model_type": "clip"}'), InvalidArgument, "loading a model"),
        (setting(hidden_size="wide"), InvalidArgument, "hidden_size"),
        (setting(num_attention_heads=0), InvalidArgument, "loading a model"),
        (setting(hidden_size=48), InvalidArgument, "loading a model"),
        (without_weights, NotFound, "no model.safetensors"),
        (cut(0), Corrupt, "safetensors"),
        (cut(5), Corrupt, "safetensors"),
        (cut(400), Corrupt, "safetensors"),
        (cut(-1), Corrupt, "safetensors"),
        (index("[]"), Corrupt, "weight_map"),
        (index("{"), Corrupt, "weight_map"),
        (index('{"weight_map": {"a": 3}}'), Corrupt, "weight_map"),
        (index('{"weight_map": {"a": "other.safetensors"}}'), NotFound, "no other.safetensors"),
    ],
)
def test_what_is_wrong_with_a_folder_is_said(
    damage: Damage, error: type[LedgerError], message: str, tiny_dense: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_dense, folder)
    damage(folder)
    with pytest.raises(error, match=message) as caught:
        create_engine("transformers", folder)
    assert str(folder) in str(caught.value)
