"""Options of episodes with an environment: turns, tools, contexts."""

from __future__ import annotations

from trainer.options.option import COUNT, Option, place
from trainer.ranges import above, at_least

__all__ = ["OPTIONS"]

OPTIONS: tuple[Option, ...] = (
    Option(
        "environment",
        "agents",
        str,
        None,
        "what answers the model: 'python', 'calculator', 'reasoning_gym:<dataset>', or "
        "'package.module:Class' (or an async function); unset: one turn a prompt",
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
        "tokens of prompt and response of an episode at most; then it is truncated. Unset: as many "
        "as the engine serves of the model",
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
    Option(
        "custom_generate_function_path",
        "agents",
        str,
        None,
        "what drives a sample, by slime's signature: async f(args, sample, sampling_params) -> "
        "Sample or a list of them; it asks the endpoint at args.sglang_router_ip and _port",
    ),
    Option(
        "rollout_sample_hook_path",
        "agents",
        "strs",
        None,
        "functions that see each sample when it has ended, by slime's signature: f(args, sample, "
        "*, rollout_id, evaluation) -> Sample or None",
    ),
    Option(
        "agent_command",
        "agents",
        str,
        None,
        "a program that is started for each sample and asks the OpenAI endpoint that its "
        "environment names",
    ),
    Option(
        "agent_function_path",
        "agents",
        str,
        None,
        "the same as a function 'package.module:function' of a rollout.openai.agent.AgentTask",
    ),
    Option(
        "agent_from_outside",
        "agents",
        bool,
        False,
        "each sample waits for an agent that is started elsewhere: it claims the sample at the "
        "endpoint and posts its reward there",
    ),
    Option(
        "tool_call_parser",
        "agents",
        str,
        "hermes",
        "how the model writes tool calls, for the endpoint",
    ),
    place(
        "agent_timeout_s",
        "agents",
        float,
        1800.0,
        "seconds that an agent or a custom function may take for a sample",
        within=above(0),
    ),
    place(
        "openai_host",
        "agents",
        str,
        "127.0.0.1",
        "where the endpoint listens: only agents should reach it",
    ),
    place(
        "openai_port",
        "agents",
        int,
        0,
        "port of the endpoint; 0: a free one",
        within=at_least(0, 65535),
    ),
)
