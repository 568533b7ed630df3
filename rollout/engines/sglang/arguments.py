"""`--sglang-NAME VALUE`: every argument of SGLang's server, passed through by its own name.

What an argument means is the server's business, which refuses what it does not know. Kept here is
how the words are told apart, which arguments this project sets itself, and which of them only say
where and how fast an engine runs.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ledger.errors import InvalidArgument, explain

__all__ = [
    "PREFIX",
    "command_words",
    "is_place",
    "sglang_options",
    "split_arguments",
    "with_sglang_options",
]

PREFIX = "--sglang-"

_SET_HERE: Mapping[str, str] = {
    "model-path": "--hf-checkpoint names the model",
    "model": "--hf-checkpoint names the model",
    "host": "engines that this command starts listen on this host; others: --rollout-engine-urls",
    "port": "a free one is taken; an engine with a port of its own: --rollout-engine-urls",
    "weight-version": "the ledger numbers the versions",
    "tp-size": "--rollout-num-gpus-per-engine says it (divided by --sglang-pp-size)",
    "tensor-parallel-size": "--rollout-num-gpus-per-engine says it",
    "tp": "--rollout-num-gpus-per-engine says it",
    "base-gpu-id": "each engine sees its own devices only",
    "gpu-id-step": "each engine sees its own devices only",
    "nnodes": "an engine on several hosts is started there: --rollout-engine-urls",
    "node-rank": "an engine on several hosts is started there: --rollout-engine-urls",
    "dist-init-addr": "an engine on several hosts is started there: --rollout-engine-urls",
    "nccl-init-addr": "an engine on several hosts is started there: --rollout-engine-urls",
    "api-key": "a command line is recorded: SGLANG_API_KEY in the environment",
    "admin-api-key": "a command line is recorded: start the engine and use --rollout-engine-urls",
    "preferred-sampling-params": "each request has all of its parameters",
    "config": "give each argument by its name, so that the ledger records it",
    "smg-grpc-mode": "the engine is talked to over HTTP",
    "grpc-mode": "the engine is talked to over HTTP",
    "router-ip": "sessions are dealt to engines here; --rollout-engine-urls attaches some",
    "router-port": "sessions are dealt to engines here; --rollout-engine-urls attaches some",
    "use-ray": "engines are actors of --launcher ray",
    "tokenizer-worker-num": "one tokenizer process: what it says of versions is one account",
}

_PLACE = re.compile(
    r"(pp-size|pipeline-parallel-size|dp-size|data-parallel-size|ep-size|expert-parallel-size|ep"
    r"|mem-fraction-static|max-running-requests|max-queued-requests|max-total-tokens"
    r"|max-prefill-tokens|chunked-prefill-size|schedule-.*|cuda-graph-.*|disable-cuda-graph.*"
    r"|disable-.*-cuda-graph|nccl-port|dist-timeout|watchdog-timeout|soft-watchdog-timeout"
    r"|log-.*|enable-metrics.*|.*-buckets|bucket-.*|decode-log-interval|show-time-cost"
    r"|crash-dump-folder|enable-trace|trace-.*|otlp-.*|download-dir|file-storage-path"
    r"|sleep-on-idle|skip-server-warmup|warmups|numa-node|cpu-offload-gb|enable-memory-saver"
    r"|delete-ckpt-after-loading|weight-loader-.*|served-model-name|stream-interval"
    r"|enable-hierarchical-cache|hicache-.*|enable-cache-report|device|batch-notify-size"
    r"|engine-info-bootstrap-port|ssl-.*|enable-p2p-check|gc-.*|enable-nccl-nvls|enable-symm-mem)"
)
"""Where, how fast and how watched: it may differ between the processes that continue a run."""


def is_place(name: str) -> bool:
    """Whether the argument `name` (without prefix) does not change what is sampled or recorded."""
    return _PLACE.fullmatch(name) is not None


def split_arguments(words: Sequence[str], own: Collection[str]) -> tuple[list[str], dict[str, Any]]:
    """Take `--sglang-NAME …` out of a command line; `own` are flags that only look like it.

    Returns the other words, and for each NAME: True where no value follows, the word, or the list
    of words; a list of lists where it is given several times. A value that begins with a dash and
    is no number is written `--sglang-NAME=VALUE`.

    Raises:
        InvalidArgument: an argument that this project sets itself.
    """
    rest: list[str] = []
    given: dict[str, list[list[str]]] = {}
    taking: list[str] | None = None
    for word in words:
        flag, has_value, value = word.partition("=")
        if flag.startswith(PREFIX) and flag not in own:
            taking = [value] if has_value else []
            given.setdefault(_checked(flag.removeprefix(PREFIX)), []).append(taking)
            if has_value:
                taking = None
        elif taking is not None and not _is_flag(word):
            taking.append(word)
        else:
            taking = None
            rest.append(word)
    return rest, {name: _simplest(times) for name, times in given.items()}


def _checked(name: str) -> str:
    reason = _SET_HERE.get(name.replace("_", "-"))
    if reason is not None or not name:
        raise InvalidArgument(
            explain(
                "passing an argument to SGLang",
                on=PREFIX + name,
                expected="an argument that is not set by this command" if name else "a name",
                do=f"leave it out: {reason}" if name else "for example --sglang-log-level warning",
            )
        )
    return name


def _is_flag(word: str) -> bool:
    return word.startswith("-") and re.fullmatch(r"-\d+(\.\d*)?([eE][+-]?\d+)?", word) is None


def _simplest(times: Sequence[list[str]]) -> Any:
    def one(words: list[str]) -> Any:
        return True if not words else words[0] if len(words) == 1 else words

    if len(times) == 1:
        return one(times[0])
    return [list(words) for words in times]


def command_words(arguments: Mapping[str, Any]) -> list[str]:
    """Back to the words of SGLang's own command line; as `split_arguments` gave them.

    Numbers stand for their text, and false for the argument's absence.

    Raises:
        InvalidArgument: an argument that is set here, or a value that no command line has.
    """
    words: list[str] = []
    for name, value in arguments.items():
        _checked(name)
        if value is False:
            continue
        times = value if isinstance(value, list) and value and _lists(value) else [value]
        for one in times:
            words.append(f"--{name}")
            if one is not True:
                values = one if isinstance(one, list) else [one]
                if any(isinstance(v, (dict, list, bool)) or v is None for v in values):
                    raise InvalidArgument(
                        explain(
                            "passing an argument to SGLang",
                            on=PREFIX + name,
                            expected="true, a text, a number, or a list of them",
                            found=value,
                        )
                    )
                words += [str(v) for v in values]
    return words


def _lists(value: list[Any]) -> bool:
    return all(isinstance(one, list) for one in value)


def sglang_options(
    words: Sequence[str], own: Collection[str]
) -> tuple[list[str], dict[str, dict[str, Any]]]:
    """Take the arguments out of a command line, as values of the two options that hold them.

    `own` are the flags of the command. Raises InvalidArgument as `split_arguments`.
    """
    rest, given = split_arguments(words, own)
    options: dict[str, dict[str, Any]] = {}
    for name, value in given.items():
        option = "sglang_place_arguments" if is_place(name) else "sglang_arguments"
        options.setdefault(option, {})[name] = value
    return rest, options


def with_sglang_options(
    given: Mapping[str, Any], options: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """`given` options with those of `sglang_options`; an argument by its own name wins."""
    return {**given, **{name: {**given.get(name, {}), **of} for name, of in options.items()}}
