"""The prompt source that the options of a command line name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ledger.errors import InvalidArgument, explain
from rollout.tasks import PromptSource, create_source
from rollout.tasks.files import FileSource
from rollout.tasks.prompt_rows import PromptData, PromptRows, content_digest

__all__ = [
    "check_digest",
    "check_rows",
    "evaluation_paths",
    "how_judged",
    "prompt_data",
    "prompt_data_of",
    "training_source",
    "with_digests",
]

_DEFAULT_TASK = "addition"


def prompt_data(values: Mapping[str, Any]) -> PromptData | None:
    """What --prompt-data and the options beside it say; None without --prompt-data.

    Raises InvalidArgument where a task is named as well, or nothing says how answers are judged.
    """
    path = values["prompt_data"]
    if path is None:
        return None
    if values["task"] != _DEFAULT_TASK:
        raise InvalidArgument(
            explain(
                "choosing where prompts come from",
                on="--prompt-data and --task",
                expected="one of them",
                found=f"--prompt-data {path} with --task {values['task']}",
            )
        )
    how_judged(values)
    return prompt_data_of(values, path)


def how_judged(values: Mapping[str, Any]) -> str:
    """The name of the reward for prompts of a file. Raises InvalidArgument without one."""
    named: str | None = values["custom_rm_path"] or values["rm_type"]
    if named is None:
        raise InvalidArgument(
            explain(
                "choosing how answers are judged",
                on="--prompt-data",
                expected="--rm-type or --custom-rm-path",
                found="nothing: a file of prompts says nothing of rewards",
            )
        )
    return named


def prompt_data_of(values: Mapping[str, Any], path: str, *, evaluation: bool = False) -> PromptData:
    """The data at `path`, read as the options say; for evaluations, as those that override them."""

    def said(name: str, own: str) -> Any:
        over = values[own] if evaluation else None
        return values[name] if over is None else over

    return PromptData(
        path=path,
        input_key=said("input_key", "eval_input_key"),
        label_key=said("label_key", "eval_label_key"),
        metadata_key=values["metadata_key"],
        tool_key=said("tool_key", "eval_tool_key"),
        apply_chat_template=values["apply_chat_template"],
        apply_chat_template_kwargs=values["apply_chat_template_kwargs"],
        shuffle=values["rollout_shuffle"] and not evaluation,
        max_prompt_len=said("rollout_max_prompt_len", "eval_max_prompt_len"),
    )


def evaluation_paths(values: Mapping[str, Any]) -> dict[str, str]:
    """--eval-prompt-data NAME PATH [NAME PATH …] by name.

    Raises InvalidArgument for a name without a path, or one that is given twice.
    """
    words = values.get("eval_prompt_data") or []
    names = words[::2]
    if len(words) % 2 or len(set(names)) != len(names):
        raise InvalidArgument(
            explain(
                "choosing evaluations",
                on="--eval-prompt-data",
                expected="pairs of a name, each another, and a path",
                found=" ".join(words),
            )
        )
    return dict(zip(names, words[1::2], strict=True))


def training_source(
    values: Mapping[str, Any], tokenizer: Any, tools: list[dict[str, Any]] | None = None
) -> PromptSource:
    """The prompts that a run trains on. Raises as `FileSource` and `create_source`.

    `tools` are told to the chat template where a row has none of its own.
    """
    data, seed = prompt_data(values), values["rollout_seed"]
    if data is None:
        return create_source(values["task"], seed=seed, options=values["task_options"])
    source = FileSource(
        data, tokenizer=tokenizer, seed=seed, reward=how_judged(values), tools=tools
    )
    check_digest(data.path, values["prompt_data_digest"], source.digest)
    return source


def check_rows(values: Mapping[str, Any]) -> None:
    """Read all prompt data once. Raises InvalidArgument for a row that cannot be used."""
    data = prompt_data(values)
    if data is not None:
        PromptRows(data).check()


def with_digests(explicit: Mapping[str, Any]) -> dict[str, Any]:
    """The options with digests of the data that they name, which are recorded and compared.

    Raises InvalidArgument where one was given that is not that of the data, and as
    `content_digest`.
    """
    given = dict(explicit)
    if given.get("prompt_data"):
        found = content_digest(given["prompt_data"])
        check_digest(given["prompt_data"], given.setdefault("prompt_data_digest", found), found)
    if given.get("eval_prompt_data"):
        paths = evaluation_paths(given)
        digests = {name: content_digest(path) for name, path in paths.items()}
        for name, said in given.setdefault("eval_data_digests", digests).items():
            if name in paths:
                check_digest(paths[name], said, digests[name])
    return given


def check_digest(path: str, expected: str | None, found: str) -> None:
    """Raises InvalidArgument where a run was recorded with other data than there is now."""
    if expected is not None and expected != found:
        raise InvalidArgument(
            explain(
                "opening the prompt data of a run",
                on=path,
                expected=f"the content that the run began with, blake3 {expected}",
                found=found,
                do="put the old content back, or say where it is now; to go on with the new one, "
                "fork a branch: --from-version K --data fresh --prompt-data PATH",
            )
        )
