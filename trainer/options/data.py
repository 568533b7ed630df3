"""Options of prompt data. Names are those of slime."""

from __future__ import annotations

from trainer.options.option import COUNT, Option, place
from trainer.ranges import LARGEST, above, at_least

__all__ = ["OPTIONS"]

OPTIONS: tuple[Option, ...] = (
    place(
        "prompt_data",
        "data",
        str,
        None,
        "prompts from a .jsonl or .parquet file, a folder of them, or one of Hugging Face's "
        "save_to_disk, in place of --task; PATH@[start:end] for some of the rows",
    ),
    Option(
        "prompt_data_digest",
        "data",
        str,
        None,
        "blake3 of the prompt data: computed and recorded when a run begins, and compared "
        "whenever it goes on",
    ),
    Option("input_key", "data", str, "input", "field of the prompt: a text or chat messages"),
    Option(
        "label_key",
        "data",
        str,
        None,
        "field of what the verifier compares with; a dotted name for one within an object: "
        "reward_model.ground_truth",
    ),
    Option(
        "metadata_key",
        "data",
        str,
        "metadata",
        "field of an object for verifiers, environments and custom functions",
    ),
    Option("tool_key", "data", str, "tools", "field of the tools for the chat template"),
    Option(
        "apply_chat_template",
        "data",
        bool,
        False,
        "write prompts by the tokenizer's chat template; a text is the user's only message",
    ),
    Option(
        "apply_chat_template_kwargs",
        "data",
        "json",
        {},
        'JSON object given to the chat template, such as {"enable_thinking": false}',
    ),
    Option(
        "rollout_shuffle",
        "data",
        bool,
        False,
        "another order of the rows in each epoch, by --rollout-seed",
    ),
    Option(
        "rollout_max_prompt_len",
        "data",
        int,
        None,
        "leave prompts of more tokens out; every prompt is encoded once at the start to find them",
        within=COUNT,
    ),
    place(
        "eval_prompt_data",
        "data",
        "strs",
        None,
        "evaluations on data: NAME PATH [NAME PATH …], formats as of --prompt-data; default: the "
        "task's own prompts of another seed",
    ),
    Option(
        "eval_data_digests",
        "data",
        "json",
        {},
        "JSON object of the blake3 of each evaluation's data, computed, recorded and compared as "
        "--prompt-data-digest",
    ),
    Option("eval_input_key", "data", str, None, "as --input-key; default: as that one"),
    Option("eval_label_key", "data", str, None, "as --label-key; default: as that one"),
    Option("eval_tool_key", "data", str, None, "as --tool-key; default: as that one"),
    Option(
        "eval_max_prompt_len",
        "data",
        int,
        None,
        "as --rollout-max-prompt-len; default: as that one",
        within=COUNT,
    ),
    Option(
        "n_samples_per_eval_prompt",
        "data",
        int,
        1,
        "responses to each prompt of --eval-prompt-data",
        within=COUNT,
    ),
    Option(
        "eval_temperature",
        "data",
        float,
        None,
        "sampling temperature on --eval-prompt-data, 0 for greedy; default: the rollout's",
        within=at_least(0),
    ),
    Option(
        "eval_top_p",
        "data",
        float,
        None,
        "nucleus mass on --eval-prompt-data; default: the rollout's",
        within=above(0, 1),
    ),
    Option(
        "eval_top_k",
        "data",
        int,
        None,
        "number of candidates on --eval-prompt-data; default: the rollout's",
        within=at_least(1, LARGEST, off=-1),
    ),
    Option(
        "eval_max_response_len",
        "data",
        int,
        None,
        "new tokens of a response on --eval-prompt-data at most; default: the rollout's",
        within=COUNT,
    ),
)
