"""Checkpoints of several ranks: exact in the layout that saved them, and in any other."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.megatron_models import make
from tests.trainer.ranks import checks_checkpoint
from tests.trainer.ranks.pair import Pair, RankFailed
from trainer.settings import ParallelSettings

pytestmark = pytest.mark.xdist_group("ranks")

TENSOR = ParallelSettings(tensor_model_parallel_size=2)
PIPELINE = ParallelSettings(pipeline_model_parallel_size=2)
DATA = ParallelSettings()
EXPERT = ParallelSettings(expert_model_parallel_size=2, expert_tensor_parallel_size=1)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("llama", tmp_path_factory.mktemp("llama")).folder


@pytest.fixture(scope="module")
def sharded(
    ranks: Pair, dense: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    """A checkpoint by two tensor-parallel ranks, and what was recorded of it."""
    target = tmp_path_factory.mktemp("sharded") / "v2"
    made = ranks.run(checks_checkpoint.save, dense, target, TENSOR, "torch_dist-1", layout=TENSOR)
    assert made[0]["saved"] == dataclasses.replace(made[1]["saved"])
    return target, made[0]


def test_every_ranks_files_are_in_the_manifest(sharded: tuple[Path, dict[str, Any]]) -> None:
    target, made = sharded
    saved = made["saved"]
    assert set(saved.files) == {path.name for path in target.iterdir()}
    assert {name[:4] for name in saved.files if name.endswith(".distcp")} == {"__0_", "__1_"}
    assert {"config.json", "random_state.safetensors", "random_state_00001.safetensors"} <= {
        *saved.files
    }
    assert [path.name for path in target.parent.iterdir()] == ["v2"]


def test_it_goes_on_bit_for_bit_in_the_same_layout(
    ranks: Pair, sharded: tuple[Path, dict[str, Any]]
) -> None:
    target, made = sharded
    found = ranks.run(checks_checkpoint.restore, target, made, TENSOR, layout=TENSOR)
    assert found == [made["next"], made["next"]]


@pytest.mark.parametrize(
    ("layout", "distributed"), [(PIPELINE, False), (DATA, True)], ids=["pipeline", "data"]
)
def test_other_layouts_restore_the_same_state(
    ranks: Pair, sharded: tuple[Path, dict[str, Any]], layout: ParallelSettings, distributed: bool
) -> None:
    """`restore` compares every tensor's checksum; the norm is summed in another order."""
    target, made = sharded
    found = ranks.run(checks_checkpoint.restore, target, made, layout, distributed, layout=layout)
    assert found[0] == found[1]
    assert found[0][2] == pytest.approx(made["next"][2], rel=1e-5)


def test_one_rank_restores_it(
    megatron: ParallelSettings, sharded: tuple[Path, dict[str, Any]]
) -> None:
    target, made = sharded
    found = checks_checkpoint.restore(target, made, megatron)
    assert found[2] == pytest.approx(made["next"][2], rel=1e-5)


def test_a_distributed_optimizer_and_a_pipeline_give_their_shards_too(
    ranks: Pair, dense: Path, tmp_path: Path
) -> None:
    by_data = tmp_path / "data"
    made = ranks.run(
        checks_checkpoint.save, dense, by_data, DATA, "torch_dist-1", True, layout=DATA
    )[0]
    found = ranks.run(checks_checkpoint.restore, by_data, made, DATA, True, layout=DATA)
    assert found == [made["next"], made["next"]]
    ranks.run(checks_checkpoint.restore, by_data, made, TENSOR, layout=TENSOR)
    by_stage = tmp_path / "stage"
    made = ranks.run(
        checks_checkpoint.save, dense, by_stage, PIPELINE, "hf-safetensors-1", layout=PIPELINE
    )[0]
    found = ranks.run(checks_checkpoint.restore, by_stage, made, PIPELINE, layout=PIPELINE)
    assert found == [made["next"], made["next"]]
    ranks.run(checks_checkpoint.restore, by_stage, made, DATA, layout=DATA)


def test_experts_move_between_ranks(
    ranks: Pair, megatron: ParallelSettings, tmp_path: Path
) -> None:
    experts = make("qwen3_moe", tmp_path / "moe").folder
    target = tmp_path / "v2"
    made = ranks.run(
        checks_checkpoint.save, experts, target, EXPERT, "torch_dist-1", layout=EXPERT
    )[0]
    found = ranks.run(checks_checkpoint.restore, target, made, EXPERT, layout=EXPERT)
    assert found == [made["next"], made["next"]]
    checks_checkpoint.restore(target, made, megatron)


def test_it_is_written_in_the_background_as_it_was(
    ranks: Pair, dense: Path, sharded: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    target = tmp_path / "v2"
    made = ranks.run(checks_checkpoint.save_in_background, dense, target, TENSOR, layout=TENSOR)[0]
    assert not made["there"]
    assert made["next"] == sharded[1]["next"]
    found = ranks.run(checks_checkpoint.restore, target, made, TENSOR, layout=TENSOR)
    assert found == [made["next"], made["next"]]
    left = ranks.run(checks_checkpoint.abandon, dense, tmp_path / "v3", TENSOR, layout=TENSOR)
    assert left[0] == ["v2"]


def test_a_changed_byte_is_found_before_it_is_unpickled(
    ranks: Pair, sharded: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    target, made = sharded
    shutil.copytree(target, tmp_path / "v2")
    changed = tmp_path / "v2" / "common.pt"
    if not changed.exists():
        changed = tmp_path / "v2" / ".metadata"
    content = bytearray(changed.read_bytes())
    content[len(content) // 2] ^= 1
    changed.write_bytes(content)
    with pytest.raises(RankFailed, match=f"file {changed.name}"):
        ranks.run(checks_checkpoint.restore, tmp_path / "v2", made, TENSOR, layout=TENSOR)
