"""A request in SGLang's words: the body of `POST /generate` (sglang 0.5.23).

Token ids in, one request a sample, everything that the ledger records asked for by name. Where a
server has defaults of its own (`--preferred-sampling-params`), what is said here wins: every
parameter that changes a distribution is sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rollout.protocol import GenerationRequest, SamplingParams

__all__ = ["SENT_SAMPLING_PARAMS", "Extras", "generate_body", "wire_rid"]

SENT_SAMPLING_PARAMS = frozenset(
    {
        "max_new_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "frequency_penalty",
        "presence_penalty",
        "repetition_penalty",
        "min_new_tokens",
        "n",
        "ignore_eos",
        "stop_token_ids",
        "sampling_seed",
        "skip_special_tokens",
    }
)
"""Sampling parameters that each request has, so that no default of a server's can matter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Extras:
    """What is asked for beside tokens and log-probabilities."""

    routed_experts: bool = False
    indexer_topk: bool = False

    def sampling_mask(self, params: SamplingParams) -> bool:
        """Whether the ids that top-p and top-k left are asked for too."""
        return params.keeps_sets


def wire_rid(name: str, attempt: int) -> str:
    """The name under which attempt number `attempt` of the request `name` is sent.

    SGLang's abort takes every request whose name *begins* with the one given, so no name may be a
    prefix of another: this one ends with a mark (`~N~`) that a name, in which each `~` is doubled,
    cannot hold.
    """
    return f"{name.replace('~', '~~')}~{attempt}~"


def generate_body(
    request: GenerationRequest, params: SamplingParams, *, rid: str, extras: Extras
) -> dict[str, Any]:
    """The JSON object of one request.

    `ignore_eos` stays off, since it would switch `stop_token_ids` off too: the engine ends at the
    model's own end ids besides (`ModelFacts.end_token_ids`), and says which one it was.
    """
    greedy = params.temperature == 0
    body: dict[str, Any] = {
        "rid": rid,
        "input_ids": request.tokens.tolist(),
        "sampling_params": {
            "max_new_tokens": params.max_new_tokens,
            "temperature": 0.0 if greedy else float(params.temperature),
            "top_p": 1.0 if greedy else float(params.top_p),
            "top_k": -1 if greedy else int(params.top_k),
            "min_p": 0.0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "repetition_penalty": 1.0,
            "min_new_tokens": 0,
            "n": 1,
            "ignore_eos": False,
            "stop_token_ids": [int(i) for i in params.stop_token_ids],
            "sampling_seed": int(request.seed),
            "skip_special_tokens": False,
        },
        "stream": False,
        "return_logprob": True,
        "logprob_start_len": -1,
        "top_logprobs_num": 0,
        "return_text_in_logprobs": False,
    }
    if request.session_id is not None:
        body["session_id"] = request.session_id
    if extras.routed_experts:
        body["return_routed_experts"] = True
        body["routed_experts_start_len"] = int(request.routing_start)
    if extras.indexer_topk:
        body["return_indexer_topk"] = True
    if extras.sampling_mask(params):
        body["return_sampling_mask"] = True
    return body
