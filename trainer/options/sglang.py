"""Options of engines of SGLang. `--sglang-NAME VALUE` reaches its server as it is."""

from __future__ import annotations

from trainer.options.option import COUNT, Option, place
from trainer.ranges import LARGEST, above, at_least

__all__ = ["OPTIONS"]

OPTIONS: tuple[Option, ...] = (
    place(
        "rollout_num_gpus",
        "engines",
        int,
        None,
        "with --engine sglang: GPUs of all engines that are started here; default: those of one",
        within=COUNT,
    ),
    place(
        "rollout_num_gpus_per_engine",
        "engines",
        int,
        1,
        "GPUs of an engine: its tensor parallelism, times --sglang-pp-size",
        within=COUNT,
    ),
    place(
        "rollout_engine_urls",
        "engines",
        "strs",
        None,
        "addresses of SGLang servers that run already (http://host:port …): none is started",
    ),
    Option(
        "sglang_arguments",
        "engines",
        "json",
        {},
        "arguments of SGLang's server that bear on what is sampled, as --sglang-NAME VALUE gives "
        "them (--sglang-kv-cache-dtype fp8_e5m2, --sglang-enable-deterministic-inference)",
    ),
    place(
        "sglang_place_arguments",
        "engines",
        "json",
        {},
        "the same for those that say where and how fast it runs (--sglang-mem-fraction-static 0.8, "
        "--sglang-dp-size 2)",
    ),
    place(
        "sglang_server_concurrency",
        "engines",
        int,
        512,
        "requests that run on an engine at a time",
        within=COUNT,
    ),
    place(
        "rollout_engine_python",
        "engines",
        str,
        None,
        "interpreter that has sglang; default: this one",
    ),
    place(
        "rollout_engine_module",
        "engines",
        str,
        "sglang.launch_server",
        "module, or script, that takes the server's arguments",
    ),
    place(
        "rollout_engine_env",
        "engines",
        "json",
        {},
        "JSON object of variables that engines find in their environment besides",
    ),
    place(
        "rollout_engine_log_dir",
        "engines",
        str,
        None,
        "folder for the logs of engines; default: one under the temporary folder",
    ),
    place(
        "rollout_engine_ready_timeout",
        "engines",
        float,
        1200.0,
        "seconds that an engine may take to start",
        within=above(0),
    ),
    place(
        "rollout_request_timeout",
        "engines",
        float,
        None,
        "seconds after which a request to an engine is sent again; default: never",
        within=above(0),
    ),
    place(
        "rollout_request_attempts",
        "engines",
        int,
        4,
        "times that a request is sent before it has failed",
        within=COUNT,
    ),
    place(
        "rollout_health_check_interval",
        "engines",
        float,
        30.0,
        "seconds between two looks at an engine's health",
        within=above(0),
    ),
    place(
        "rollout_health_check_timeout",
        "engines",
        float,
        60.0,
        "seconds that it may take to answer; after two in a row it is started again",
        within=above(0),
    ),
    place(
        "rollout_engine_restarts",
        "engines",
        int,
        3,
        "times that an engine is started again before it is given up",
        within=at_least(0, LARGEST),
    ),
)
