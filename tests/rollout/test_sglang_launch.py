"""Server processes: started with the right words, watched, and gone with who started them."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ledger.errors import EngineFailed, InvalidArgument, MissingDependency
from rollout.engines.sglang.arguments import (
    command_words,
    is_place,
    sglang_options,
    split_arguments,
    with_sglang_options,
)
from rollout.engines.sglang.create import create_sglang_pool
from rollout.engines.sglang.keeper import PoolSettings
from rollout.engines.sglang.launch import LaunchPlan, device_shares
from rollout.engines.sglang.settings import SGLangSettings, sglang_settings
from trainer.option_values import defaults

LAUNCHED = Path(__file__).parent / "sglang_launched.py"


# Words


def test_arguments_of_the_server_are_taken_out_of_a_command_line() -> None:
    words = [
        "--engine",
        "sglang",
        "--sglang-mem-fraction-static",
        "0.8",
        "--lr",
        "1e-6",
        "--sglang-enable-metrics",
        "--sglang-server-concurrency",
        "7",
        "--sglang-cuda-graph-bs",
        "1",
        "2",
        "4",
        "--sglang-random-seed",
        "-3",
        "--sglang-json-model-override-args={}",
        "--sglang-x=--y",
        "--sglang-x",
        "z",
        "--",
        "rest",
    ]
    rest, given = split_arguments(words, {"--sglang-server-concurrency", "--engine"})
    assert rest == [
        "--engine",
        "sglang",
        "--lr",
        "1e-6",
        "--sglang-server-concurrency",
        "7",
        "--",
        "rest",
    ]
    assert given == {
        "mem-fraction-static": "0.8",
        "enable-metrics": True,
        "cuda-graph-bs": ["1", "2", "4"],
        "random-seed": "-3",
        "json-model-override-args": "{}",
        "x": [["--y"], ["z"]],
    }
    again = [
        "--mem-fraction-static",
        "0.8",
        "--enable-metrics",
        "--cuda-graph-bs",
        "1",
        "2",
        "4",
        "--random-seed",
        "-3",
        "--json-model-override-args",
        "{}",
        "--x",
        "--y",
        "--x",
        "z",
    ]
    assert command_words(given) == again


@pytest.mark.parametrize(
    ("flag", "says"),
    [
        ("--sglang-tp-size", "--rollout-num-gpus-per-engine"),
        ("--sglang-model-path", "--hf-checkpoint"),
        ("--sglang-port", "--rollout-engine-urls"),
        ("--sglang-weight_version", "the ledger numbers"),
        ("--sglang-api-key=secret", "SGLANG_API_KEY"),
        ("--sglang-", "a name"),
    ],
)
def test_what_is_set_here_is_refused(flag: str, says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        split_arguments([flag, "2"], set())
    with pytest.raises(InvalidArgument, match=says):
        command_words({flag.removeprefix("--sglang-").partition("=")[0]: "2"})


def test_values_that_no_command_line_has_are_refused() -> None:
    assert command_words({"a": False, "b": 2, "c": 0.5}) == ["--b", "2", "--c", "0.5"]
    for value in (None, {"a": 1}, [None], [True]):
        with pytest.raises(InvalidArgument, match="--sglang-a"):
            command_words({"a": value})


def test_what_bears_on_samples_is_kept_apart_from_where_and_how_fast() -> None:
    words = [
        "--sglang-kv-cache-dtype",
        "fp8_e5m2",
        "--sglang-dp-size",
        "2",
        "--sglang-log-level",
        "warning",
        "--sglang-enable-deterministic-inference",
    ]
    _, options = sglang_options(words, set())
    assert options == {
        "sglang_arguments": {"kv-cache-dtype": "fp8_e5m2", "enable-deterministic-inference": True},
        "sglang_place_arguments": {"dp-size": "2", "log-level": "warning"},
    }
    merged = with_sglang_options({"lr": 1, "sglang_arguments": {"dtype": "x"}}, options)
    assert merged["sglang_arguments"] == {"dtype": "x", **options["sglang_arguments"]}
    assert [is_place(n) for n in ("max-running-requests", "quantization", "new-flag")] == [
        True,
        False,
        False,
    ]


@pytest.mark.parametrize("command", ["trainer.cli", "rollout.cli"])
def test_a_command_refuses_what_it_sets_itself(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "--ledger",
        "nowhere",
        "--engine",
        "sglang",
        "--sglang-dp-size",
        "2",
        "--sglang-port",
        "30000",
    ]
    assert importlib.import_module(command).main(words) == 2
    assert "--rollout-engine-urls" in capsys.readouterr().err
    assert not Path("nowhere").exists()


@pytest.mark.parametrize("command", ["trainer.cli", "rollout.cli"])
@pytest.mark.parametrize(
    "words", [["--sglang-dp-size", "2"], ["--rollout-engine-urls", "http://127.0.0.1:9"]]
)
def test_what_only_sglang_reads_is_refused_with_another_engine(
    command: str, words: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    task = ["--hf-checkpoint", "nowhere", "--task", "addition"]
    alone = ["--rollout-only"] if command == "rollout.cli" else []
    here = ["--ledger", str(tmp_path / "ledger")]
    assert importlib.import_module(command).main([*here, *task, *alone, *words]) == 2
    said = capsys.readouterr().err
    assert words[0] in said
    assert "--engine sglang" in said


# Settings


def test_settings_from_options() -> None:
    values = {
        **defaults(),
        "bf16": True,
        "rollout_num_gpus": 8,
        "rollout_num_gpus_per_engine": 4,
        "sglang_arguments": {"sampling-backend": "pytorch"},
        "sglang_place_arguments": {"pp-size": "2"},
    }
    settings = sglang_settings(values)
    assert settings.num_engines == 2
    assert settings.server_words(has_experts=True) == (
        *[
            "--sampling-backend",
            "pytorch",
            "--pp-size",
            "2",
            "--dtype",
            "bfloat16",
            "--tp-size",
            "2",
        ],
        "--enable-return-routed-experts",
    )
    assert "--enable-return-routed-experts" not in settings.server_words(has_experts=False)
    off = sglang_settings({**values, "use_rollout_routing_replay": False})
    assert "--enable-return-routed-experts" not in off.server_words(has_experts=True)
    own = sglang_settings({**values, "use_routing_replay": True})
    assert "--enable-return-routed-experts" not in own.server_words(has_experts=True)
    for change, says in (
        ({"recompute_logprobs_via_prefill": True}, "--recompute-logprobs-via-prefill"),
        ({"replay_routing_weights": True}, "--replay-routing-weights"),
        ({"sglang_arguments": {"pp-size": "2"}}, "each argument once"),
        ({"rollout_num_gpus": 6}, "a multiple"),
        ({"sglang_place_arguments": {"pp-size": "3"}}, "a divisor"),
        ({"sglang_place_arguments": {"pp-size": "x"}}, "a number"),
    ):
        with pytest.raises(InvalidArgument, match=says):
            sglang_settings({**values, **change})


def test_engines_that_run_already() -> None:
    urls = ("http://a:1", "http://b:1")
    assert SGLangSettings(urls=urls).num_engines == 2
    SGLangSettings(urls=urls).check_installed()
    for options, says in (
        ({"urls": ("a:1",)}, "http://host:port"),
        ({"urls": (*urls, urls[0])}, "each engine once"),
        ({"urls": urls, "num_gpus": 2}, "arguments of their own"),
        ({"urls": urls, "arguments": {"x": True}}, "arguments of their own"),
    ):
        with pytest.raises(InvalidArgument, match=says):
            SGLangSettings(**options)  # type: ignore[arg-type]
    with pytest.raises(MissingDependency, match="no interpreter /nowhere/python"):
        SGLangSettings(python="/nowhere/python").check_installed()


def test_devices_are_dealt_out_from_the_end() -> None:
    assert device_shares(["0", "1", "2", "3", "4"], 2, 2) == [("1", "2"), ("3", "4")]
    assert device_shares([], 2, 2) is None
    with pytest.raises(InvalidArgument, match="at least 4"):
        device_shares(["0"], 2, 2)


# Processes


@pytest.fixture
def model(tmp_path: Path) -> Path:
    sizes = {"vocab_size": 64, "max_position_embeddings": 128, "num_hidden_layers": 3}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", **sizes}))
    return tmp_path


def settings(model: Path, **more: Any) -> SGLangSettings:
    quick = PoolSettings(backoff_s=0.01, health_interval_s=60.0, restarts=1)
    environment = {"LAUNCHED_DO": more.pop("do", "")}
    return SGLangSettings(
        module=str(LAUNCHED),
        environment=environment,
        log_dir=model / "logs",
        pool=replace(quick, **more.pop("pool", {})),
        **more,
    )


def alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def pids(model: Path) -> list[int]:
    return [int(pid) for pid in (model / "pids").read_text().split()]


async def until(condition: Callable[[], object]) -> None:
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < 30, "the condition does not come true"
        await asyncio.sleep(0.01)


def test_a_server_is_started_again_after_its_death_and_ends_with_its_pool(model: Path) -> None:
    async def check() -> None:
        pool = create_sglang_pool(
            model,
            settings(model, arguments={"log-level": "error"}, num_gpus_per_engine=2),
            devices=["4", "5", "6"],
        )
        await pool.start()
        log = (model / "logs" / "engine-0.log").read_text()
        assert f"--model-path {model}" in log
        assert "--log-level error --dtype float32 --tp-size 2" in log
        assert "devices: 5,6" in log
        first = pids(model)
        assert pool.describe()["0"]["pid"] == first[0]
        os.kill(first[0], signal.SIGKILL)
        await until(lambda: pool.members[0].serves and pids(model) != first)
        assert not any(alive(pid) for pid in first)
        second = pids(model)
        assert all(alive(pid) for pid in second)
        os.kill(second[0], signal.SIGKILL)
        await until(lambda: pool.members[0].lost is not None)
        assert "SIGKILL" in str(pool.members[0].lost)
        await pool.close()
        await until(lambda: not any(alive(pid) for pid in second))

    asyncio.run(check())


def test_a_server_that_does_not_start_shows_its_last_words(model: Path) -> None:
    async def check() -> None:
        pool = create_sglang_pool(model, settings(model, do="die"))
        with pytest.raises(EngineFailed, match="no memory left on the device") as failed:
            await pool.start()
        assert "exit code 3" in str(failed.value)
        assert "engine-0.log" in str(failed.value)

    asyncio.run(check())


def test_a_port_that_somebody_took_is_another_one_the_next_time(model: Path) -> None:
    async def check() -> None:
        pool = create_sglang_pool(model, settings(model, do="taken"))
        await pool.start()
        process = pool.members[0].process
        assert process is not None
        assert process.starts == 2
        await pool.close()
        assert not any(alive(pid) for pid in pids(model))

    asyncio.run(check())


_PARENT = """
import asyncio, sys
from pathlib import Path
from rollout.engines.sglang.launch import EngineProcess, LaunchPlan

async def main():
    folder = Path(sys.argv[1])
    plan = LaunchPlan(model_dir=folder, log=folder / "log", module=sys.argv[2])
    async def ready(_):
        return (folder / "pids").exists()
    await EngineProcess(plan).start(ready)
    print("started", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's death signal is Linux's")
def test_no_server_outlives_a_parent_that_is_killed(model: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", _PARENT, str(model), str(LAUNCHED)], stdout=subprocess.PIPE
    )
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"started\n"
    server, child = pids(model)
    assert alive(server)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    asyncio.run(until(lambda: not alive(server)))
    # SGLang's own children follow it by the same signal; this stand-in's does not.
    os.kill(child, signal.SIGKILL)


def test_a_module_and_a_script(tmp_path: Path) -> None:
    plan = LaunchPlan(model_dir=Path("m"), log=tmp_path / "log", words=("--x",), python="py")
    assert plan.command(7) == (
        [
            "py",
            "-m",
            "sglang.launch_server",
            "--model-path",
            "m",
            "--host",
            "127.0.0.1",
            "--port",
            "7",
            "--x",
        ]
    )
    assert replace(plan, module="cpu.py").command(7)[:2] == ["py", "cpu.py"]
    made = replace(plan, environment={"HOME": "", "A": "1"}, devices=("2", "3")).full_environment()
    assert "HOME" not in made
    assert (made["A"], made["CUDA_VISIBLE_DEVICES"]) == ("1", "2,3")
    assert made["SGLANG_RETURN_ORIGINAL_LOGPROB"] == "0"
