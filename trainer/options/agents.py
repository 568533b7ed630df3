"""Options of episodes with an environment: turns, tools, contexts."""

from __future__ import annotations

from trainer.options.option import COUNT, Option, place
from trainer.ranges import above

__all__ = ["OPTIONS"]

OPTIONS: tuple[Option, ...] = (
    Option(
        "environment",
        "agents",
        str,
        None,
        "what answers the model: 'python', 'calculator', 'reasoning_gym:<dataset>', or "
        "'package.module:function'; unset: one turn a prompt",
    ),
    Option("environment_options", "agents", "json", {}, "JSON object given to the environment"),
    Option(
        "environment_turns",
        "agents",
        str,
        None,
        "what is put around the environment's words: 'chat' (the tokenizer's chat template) or "
        "'plain' (nothing); default: chat with --apply-chat-template",
        choices=("chat", "plain"),
    ),
    Option(
        "environment_keep_history",
        "agents",
        bool,
        False,
        "take a chat template that renders earlier turns otherwise than they were sampled (one "
        "that leaves reasoning out); what was sampled stays in the context",
    ),
    place(
        "environment_timeout_s",
        "agents",
        float,
        60.0,
        "seconds that the environment may take for an answer",
        within=above(0),
    ),
    Option("max_turns", "agents", int, 8, "turns of the model in an episode", within=COUNT),
    Option(
        "rollout_max_context_len",
        "agents",
        int,
        None,
        "tokens of prompt and response of an episode at most; unset: no limit but that of turns",
        within=COUNT,
    ),
    Option(
        "compact_context_at",
        "agents",
        int,
        None,
        "tokens above which the model sums up and goes on with its summary, in a sibling sample "
        "of the same rollout; unset: never",
        within=COUNT,
    ),
    Option(
        "compact_context_prompt",
        "agents",
        str,
        "Sum up what matters so far. You go on with your summary alone.",
        "what the model is told then",
    ),
    Option(
        "rollout_stop_token_ids",
        "agents",
        "ints",
        None,
        "ids that end a turn; default: the task's, or the tokenizer's end token",
    ),
)
