"""The layout file: what it may say, what it means, and what a wrong one is answered with."""

from __future__ import annotations

from pathlib import Path

import pytest

from ledger.errors import InvalidArgument, NotFound
from rollout.ray.cli import _commands, main
from rollout.ray.layout import (
    EnginesLayout,
    Layout,
    TrainerLayout,
    WorkersLayout,
    explained,
    read_layout,
)


def test_what_is_left_out_is_one_of_each(tmp_path: Path) -> None:
    (tmp_path / "empty.toml").write_text("")
    assert read_layout(tmp_path / "empty.toml") == Layout()
    assert Layout().needed() == {"GPU": 2.0, "CPU": 2.0}


def test_engines_and_workers_have_bundles_of_their_own() -> None:
    layout = Layout(
        trainer=TrainerLayout(nodes=2, gpus_per_node=8),
        engines=EnginesLayout(number=2, gpus=4, tp=2, cpus=3),
        workers=WorkersLayout(number=2, cpus=5),
    )
    assert layout.trainer_bundles() == [{"GPU": 8, "CPU": 8}] * 2
    assert layout.rollout_bundles() == [{"GPU": 4, "CPU": 3}] * 2 + [{"CPU": 5}] * 2
    assert layout.needed() == {"GPU": 24, "CPU": 32}
    text = explained(layout)
    assert "16 ranks on 2 hosts" in text
    assert "tensor parallel 2, 2 pipeline stages" in text


def test_colocated_engines_are_on_the_devices_of_the_trainer() -> None:
    layout = Layout(
        colocate=True,
        trainer=TrainerLayout(nodes=2, gpus_per_node=4),
        engines=EnginesLayout(number=3, gpus=2),
    )
    places = [(layout.node_of(n), layout.devices_of(n)) for n in range(3)]
    assert places == [(0, [0, 1]), (0, [2, 3]), (1, [0, 1])]
    # A core for each rank, and for each engine on the host.
    assert layout.trainer_bundles() == [{"GPU": 4, "CPU": 6}, {"GPU": 4, "CPU": 5}]
    assert layout.rollout_bundles() == []


def test_without_gpus_a_device_is_a_core() -> None:
    layout = Layout(device="cpu", trainer=TrainerLayout(gpus_per_node=2))
    assert layout.needed() == {"CPU": 3.0}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[engine]\nnumber = 1", "engine"),
        ("strategy = 'CLOSE'", "PACK, SPREAD"),
        ("colocate = 1", "true or false"),
        ("[workers]\nnumber = true", "a whole number"),
        ("[workers]\nnumber = -1", "at least 0"),
        ("[engines]\ngpu = 1", "number, gpus, tp, cpus"),
        ("[engines]\ngpus = 3\ntp = 2", "a divisor of the 3 devices"),
        ("colocate = true\n[engines]\nnumber = 2", "at most the trainer's 1 devices"),
        (
            "colocate = true\n[trainer]\ngpus_per_node = 3\nnodes = 2\n[engines]\ngpus = 2",
            "do not reach over hosts",
        ),
        ("engines = 2", "a section [engines]"),
        ("number =", "TOML"),
    ],
)
def test_a_wrong_one_is_refused_by_name(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "layout.toml"
    path.write_text(text)
    with pytest.raises(InvalidArgument) as refused:
        read_layout(path)
    assert expected in str(refused.value)
    assert str(path) in str(refused.value)


def test_a_file_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(NotFound):
        read_layout(tmp_path / "none.toml")
    assert main(["--layout", str(tmp_path / "none.toml")]) == 2
    assert "none.toml" in capsys.readouterr().err


def test_explained_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.toml").write_text("device = 'cpu'")
    assert main(["--layout", str(tmp_path / "a.toml"), "--explain-layout"]) == 0
    assert "1 engine with 1 processor core each" in capsys.readouterr().out


def test_each_command_gets_what_is_its_own() -> None:
    words = ["--ledger", "x", "--lr", "1e-3", "--use-te-rng-tracker", "--num-rollout", "3"]
    found = _commands(Path("/l.toml"), words)
    shared = ["--layout", "/l.toml", "--json"]
    assert found["ledger-train"] == [*words, *shared, "--rollout-by", "elsewhere"]
    # Settings of Megatron-Core are the trainer's alone.
    rest = [word for word in words if word != "--use-te-rng-tracker"]
    assert found["ledger-rollout"] == [*rest, *shared]
    with pytest.raises(InvalidArgument, match="--branch"):
        _commands(Path("/l.toml"), ["--from-version", "3"])
