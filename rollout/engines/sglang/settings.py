"""What engines of SGLang can be told, as frozen data."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ledger.errors import InvalidArgument, MissingDependency, explain
from rollout.engines.sglang.arguments import command_words
from rollout.engines.sglang.keeper import PoolSettings

__all__ = ["SGLangSettings", "sglang_settings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SGLangSettings:
    """How many engines, where, and with what. Raises InvalidArgument where made."""

    urls: tuple[str, ...] = ()
    """Addresses of engines that run already; empty: this process starts them."""
    num_gpus: int | None = None
    """Of all engines that are started; None: as many as one engine has."""
    num_gpus_per_engine: int = 1
    concurrency: int = 512
    """Requests that run on an engine at a time."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Of SGLang's server, by their names; see `arguments.split_arguments`."""
    reports_experts: bool = True
    """Whether engines of a mixture of experts are started so that they report experts."""
    dtype: str = "float32"
    """Of the weights, where `arguments` does not say it: that in which they are published."""
    python: str = sys.executable
    """Interpreter that has sglang; it may be of another environment."""
    module: str = "sglang.launch_server"
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that engines get beside those of this process."""
    log_dir: Path | None = None
    """For a log of each engine; None: a folder under the temporary one."""
    ready_timeout_s: float = 1200.0
    request_timeout_s: float | None = None
    pool: PoolSettings = field(default_factory=PoolSettings)

    def __post_init__(self) -> None:
        """Check what fits together."""
        for name, value in (
            ("--rollout-num-gpus-per-engine", self.num_gpus_per_engine),
            (
                "--rollout-num-gpus",
                self.num_gpus_per_engine if self.num_gpus is None else self.num_gpus,
            ),
            ("--sglang-server-concurrency", self.concurrency),
        ):
            if value < 1:
                raise _cannot(name, "at least 1", value)
        if self.num_gpus is not None and self.num_gpus % self.num_gpus_per_engine:
            raise _cannot(
                "--rollout-num-gpus",
                f"a multiple of --rollout-num-gpus-per-engine = {self.num_gpus_per_engine}",
                self.num_gpus,
            )
        if self.num_gpus_per_engine % self.pipeline_stages:
            raise _cannot(
                "--sglang-pp-size",
                f"a divisor of --rollout-num-gpus-per-engine = {self.num_gpus_per_engine}",
                self.pipeline_stages,
            )
        command_words(self.arguments)
        if self.urls and (self.arguments or self.num_gpus is not None):
            raise _cannot(
                "--rollout-engine-urls",
                "engines that run already, with arguments of their own",
                "--sglang-… arguments or --rollout-num-gpus besides",
            )
        for url in self.urls:
            if not url.startswith(("http://", "https://")):
                raise _cannot("--rollout-engine-urls", "http://host:port", url)
        if len(set(self.urls)) != len(self.urls):
            raise _cannot("--rollout-engine-urls", "each engine once", " ".join(self.urls))

    @property
    def num_engines(self) -> int:
        """Engines that are attached or started."""
        return len(self.urls) or (self.num_gpus or self.num_gpus_per_engine) // (
            self.num_gpus_per_engine
        )

    @property
    def pipeline_stages(self) -> int:
        """Of each engine that is started."""
        given = self.arguments.get("pp-size", self.arguments.get("pipeline-parallel-size", 1))
        try:
            return max(1, int(given))
        except (TypeError, ValueError):
            raise _cannot("--sglang-pp-size", "a number", given) from None

    def server_words(self, *, has_experts: bool) -> tuple[str, ...]:
        """The words of a server's command line, beside model, host and port."""
        words = command_words(self.arguments)
        if "dtype" not in self.arguments:
            words += ["--dtype", self.dtype]
        words += ["--tp-size", str(self.num_gpus_per_engine // self.pipeline_stages)]
        flag = "enable-return-routed-experts"
        if has_experts and self.reports_experts and flag not in self.arguments:
            words.append(f"--{flag}")
        return tuple(words)

    def check_installed(self) -> None:
        """Whether engines can be started from here. Raises MissingDependency."""
        if self.urls:
            return
        if self.python == sys.executable:
            if self.module.endswith(".py") or importlib.util.find_spec("sglang") is not None:
                return
            found = "none in this process's environment"
        elif shutil.which(self.python) is not None:
            return
        else:
            found = f"no interpreter {self.python}"
        raise MissingDependency(
            explain(
                "making an engine",
                on="--engine sglang",
                expected="the package sglang (0.5.23)",
                found=found,
                do="pip install sglang (a CUDA GPU), or name an interpreter that has it "
                "(--rollout-engine-python), or engines that run (--rollout-engine-urls)",
            )
        )


def _cannot(on: str, expected: str, found: object) -> InvalidArgument:
    return InvalidArgument(
        explain("setting up SGLang engines", on=on, expected=expected, found=found)
    )


def sglang_settings(values: Mapping[str, Any]) -> SGLangSettings:
    """From the options of the command line, by name.

    Raises:
        InvalidArgument: what cannot work together, or what SGLang does not report.
    """
    for name, why in (
        ("recompute_logprobs_via_prefill", "log-probabilities come from its own sampler"),
        ("record_routing_weights", "it reports which experts, not their weights"),
        ("replay_routing_weights", "it reports which experts, not their weights"),
    ):
        if values.get(name):
            flag = "--" + name.replace("_", "-")
            raise _cannot(flag, f"off with --engine sglang: {why}", "on")
    both = set(values["sglang_arguments"]) & set(values["sglang_place_arguments"])
    if both:
        raise _cannot("--sglang-arguments", "each argument once", ", ".join(sorted(both)))
    arguments = {**values["sglang_arguments"], **values["sglang_place_arguments"]}
    if values.get("pause_generation_mode") == "in_place" and not values["rollout_engine_urls"]:
        # Else the engine labels a token of the old weights with the new version.
        arguments.setdefault("disable-overlap-schedule", True)
    if values.get("offload_rollout"):
        _check_offload(values)
        arguments.setdefault("enable-memory-saver", True)
    replay = values.get("use_rollout_routing_replay")
    logs = values["rollout_engine_log_dir"]
    return SGLangSettings(
        urls=tuple(values["rollout_engine_urls"] or ()),
        num_gpus=values["rollout_num_gpus"],
        num_gpus_per_engine=values["rollout_num_gpus_per_engine"],
        concurrency=values["sglang_server_concurrency"],
        arguments=arguments,
        reports_experts=not values.get("use_routing_replay") if replay is None else bool(replay),
        dtype="bfloat16" if values.get("bf16") else "float32",
        python=values["rollout_engine_python"] or sys.executable,
        module=values["rollout_engine_module"],
        environment={k: str(v) for k, v in values["rollout_engine_env"].items()},
        log_dir=Path(logs) if logs else None,
        ready_timeout_s=values["rollout_engine_ready_timeout"],
        request_timeout_s=values["rollout_request_timeout"],
        pool=PoolSettings(
            attempts=values["rollout_request_attempts"],
            health_interval_s=values["rollout_health_check_interval"],
            health_timeout_s=values["rollout_health_check_timeout"],
            restarts=values["rollout_engine_restarts"],
        ),
    )


def refuse_unused(given: Mapping[str, Any], engine: str) -> None:
    """Refuse what only SGLang's engines read, where `engine` is another one.

    `given` are the options of the command line, by name, without defaults. Raises InvalidArgument.
    """
    if engine == "sglang":
        return
    named = [
        "--sglang-" + name
        for option in ("sglang_arguments", "sglang_place_arguments")
        for name in given.get(option) or ()
    ]
    if given.get("rollout_engine_urls"):
        named.append("--rollout-engine-urls")
    if named:
        raise InvalidArgument(
            explain(
                "choosing the engine",
                on=", ".join(named),
                expected="--engine sglang, which it is for",
                found=f"--engine {engine}",
                do="add --engine sglang, or leave it out",
            )
        )


def _check_offload(values: Mapping[str, Any]) -> None:
    """An engine that sleeps is woken by the next update of its weights, and by nothing else."""
    for name, right, expected in (
        ("rollout_engine_urls", not values["rollout_engine_urls"], "engines of this process"),
        ("fully_async", not values["fully_async"], "rollouts and steps that take turns"),
        ("update_weights_interval", values["update_weights_interval"] == 1, "1"),
        ("rollout_by", values["rollout_by"] == "trainer", "rollouts by the trainer's process"),
    ):
        if not right:
            flag = "--" + name.replace("_", "-")
            raise _cannot(f"--offload-rollout, {flag}", expected, values[name])


def api_key() -> str | None:
    """For engines that ask for one: never an option, since command lines are recorded."""
    return os.environ.get("SGLANG_API_KEY") or None
