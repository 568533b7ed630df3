"""What a running SGLang server is: read from `/server_info` and `/model_info` (sglang 0.5.23)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ledger.errors import InvalidArgument, explain
from rollout.engines.sglang.model import ModelFacts
from rollout.engines.sglang.request import SENT_SAMPLING_PARAMS

__all__ = ["ServerFacts", "read_server_facts"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """The part of a server's account of itself that its client acts on."""

    version: str
    """Of SGLang."""
    max_positions: int
    """Context and new tokens together, at most: beyond it the server cuts without a word."""
    keeps_seeds: bool
    """Whether a request's seed decides what is sampled (--enable-deterministic-inference)."""
    reports_experts: bool
    reports_indexer: bool
    tp_size: int
    dp_size: int
    model_path: str


def read_server_facts(
    server: Mapping[str, Any], model_info: Mapping[str, Any], model: ModelFacts, *, on: str
) -> ServerFacts:
    """Convert and check; `on` is the server's address.

    Says (as a warning of this module's logger) where the server ignores seeds.

    Raises:
        InvalidArgument: another model than `model`, a server that does not generate, or one whose
            preferred sampling parameters change what is sampled.
    """
    kind = model_info.get("model_type")
    if kind is not None and model.model_type and kind != model.model_type:
        raise _misfit(on, f"a model of type {model.model_type!r}", f"{kind!r}")
    if model_info.get("is_generation") is False:
        raise _misfit(on, "a model that generates", "is_generation: false")
    preferred = model_info.get("preferred_sampling_params")
    other = sorted(set(preferred) - SENT_SAMPLING_PARAMS) if isinstance(preferred, Mapping) else []
    if other:
        raise _misfit(
            on,
            "no preferred sampling parameters beside those that each request has",
            f"--preferred-sampling-params with {', '.join(other)}",
        )
    facts = ServerFacts(
        version=str(server.get("version", "unknown")),
        max_positions=_max_positions(server, model),
        keeps_seeds=server.get("enable_deterministic_inference") is True,
        reports_experts=server.get("enable_return_routed_experts") is True,
        reports_indexer=server.get("enable_return_indexer_topk") is True,
        tp_size=int(server.get("tp_size") or 1),
        dp_size=int(server.get("dp_size") or 1),
        model_path=str(model_info.get("model_path", "")),
    )
    if not facts.keeps_seeds:
        _log.warning(
            "engine %s ignores the seeds of requests: what it samples cannot be sampled again "
            "(--sglang-enable-deterministic-inference makes it follow them)",
            on,
        )
    return facts


def _max_positions(server: Mapping[str, Any], model: ModelFacts) -> int:
    """The scheduler serves max_req_input_len + 5 - 1 tokens of a request (managers/tp_worker.py and
    Scheduler.init_req_max_new_tokens); a context alone must stay below max_req_input_len."""
    longest = server.get("max_req_input_len")
    if isinstance(longest, int) and longest > 0:
        return longest + 4
    limits = [server.get("context_length"), server.get("max_total_num_tokens"), model.max_positions]
    return min(limit for limit in limits if isinstance(limit, int) and limit > 0) - 2


def _misfit(on: str, expected: str, found: str) -> InvalidArgument:
    return InvalidArgument(
        explain(
            "using an SGLang server",
            on=on,
            expected=expected,
            found=found,
            do="name another server, or start this one for the model of --hf-checkpoint",
        )
    )
