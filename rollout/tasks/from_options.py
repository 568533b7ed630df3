"""The prompt source that the options of a command line name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ledger.errors import InvalidArgument, explain
from rollout.tasks import PromptSource, create_source
from rollout.tasks.files import FileSource
from rollout.tasks.prompt_rows import PromptData, PromptRows, content_digest

__all__ = ["check_digest", "check_rows", "prompt_data", "training_source", "with_digests"]

_DEFAULT_TASK = "addition"


def with_digests(explicit: Mapping[str, Any]) -> dict[str, Any]:
    """The options with digests of the data that they name, which are recorded and compared.

    Raises InvalidArgument where a digest was given that the data does not have.
    """
    given = dict(explicit)
    if given.get("prompt_data"):
        found = content_digest(given["prompt_data"])
        check_digest(given["prompt_data"], given.setdefault("prompt_data_digest", found), found)
    return given


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
    if values["custom_rm_path"] is None and values["rm_type"] is None:
        raise InvalidArgument(
            explain(
                "choosing how answers are judged",
                on="--prompt-data",
                expected="--rm-type or --custom-rm-path",
                found="nothing: a file of prompts says nothing of rewards",
            )
        )
    return PromptData(
        path=path,
        input_key=values["input_key"],
        label_key=values["label_key"],
        metadata_key=values["metadata_key"],
        tool_key=values["tool_key"],
        apply_chat_template=values["apply_chat_template"],
        apply_chat_template_kwargs=values["apply_chat_template_kwargs"],
        shuffle=values["rollout_shuffle"],
        max_prompt_len=values["rollout_max_prompt_len"],
    )


def training_source(
    values: Mapping[str, Any], tokenizer: Any, tools: list[dict[str, Any]] | None = None
) -> PromptSource:
    """The prompts that a run trains on. Raises as `FileSource` and `create_source`.

    `tools` are told to the chat template where a row has none of its own.
    """
    data, seed = prompt_data(values), values["rollout_seed"]
    if data is None:
        return create_source(values["task"], seed=seed, options=values["task_options"])
    named = values["custom_rm_path"] or values["rm_type"]
    source = FileSource(data, tokenizer=tokenizer, seed=seed, reward=named, tools=tools)
    check_digest(data.path, values["prompt_data_digest"], source.digest)
    return source


def check_rows(values: Mapping[str, Any]) -> None:
    """Read all prompt data once. Raises InvalidArgument for a row that cannot be used."""
    data = prompt_data(values)
    if data is not None:
        PromptRows(data).check()


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
