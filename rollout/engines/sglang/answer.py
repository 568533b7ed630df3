"""An answer of `POST /generate` (sglang 0.5.23) as a `GenerationResult`, or the promise it breaks.

The server checks little of what it says, and leaves out silently what it was not started for. What
is recorded for good must be whole: each length, each id, each requested extra is compared here.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from ledger.errors import EngineFailed, explain
from ledger.events import UNKNOWN_VERSION
from rollout.engines.sglang.extras import decode_experts, decode_indexer
from rollout.engines.sglang.model import ModelFacts
from rollout.engines.sglang.request import Extras
from rollout.protocol import GenerationRequest, GenerationResult, SamplingParams

__all__ = ["Asked", "parse_answer", "parse_version"]

_ELSEWHERE = frozenset(
    {
        "output_token_logprobs",
        "output_token_logprobs_length",
        "input_token_logprobs",
        "output_token_sampling_mask",
        "output_token_sampling_mask_length",
        "output_token_sampling_logprobs",
        "routed_experts",
        "indexer_topk",
        "weight_versions",
        "prompt_tokens",
        "completion_tokens",
        "cached_tokens",
    }
)
"""Fields of meta_info that have a place of their own in a result, or follow from one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What an answer is compared with."""

    request: GenerationRequest
    params: SamplingParams
    extras: Extras
    rid: str
    """Under which the request was sent."""
    address: str
    model: ModelFacts

    def broken(
        self, field: str, expected: object, found: object, do: str | None = None
    ) -> NoReturn:
        """Raise EngineFailed: the answer's `field` breaks a promise."""
        text = str(found)
        raise EngineFailed(
            explain(
                "reading an engine's answer",
                on=f"request {self.rid}, engine {self.address}, field {field}",
                expected=expected,
                found=text if len(text) <= 300 else text[:300] + "…",
                do=do,
            )
        )


def parse_version(said: object) -> int:
    """A weight version as the ledger counts them; UNKNOWN_VERSION for what is no such number."""
    if isinstance(said, str) and re.fullmatch(r"0|[1-9][0-9]{0,17}", said):
        return int(said)
    return UNKNOWN_VERSION


def parse_answer(
    answer: object, asked: Asked, *, time_s: float, steady: bool = True
) -> GenerationResult:
    """Check and convert the JSON of a 200 answer.

    An answer without version spans (older servers) says one version only, the one at its end. It
    counts for every token where `steady`: nobody changed the weights while the request ran.
    A version that is absent or no number of ours becomes UNKNOWN_VERSION, and the report says so
    (`unknown_version`: what the answer said instead).

    An aborted request that had been put back into the queue lacks the extras of the tokens that it
    had: they are given up (`discarded_tokens` in the report), since they could not be recorded
    whole.

    Raises:
        EngineFailed: names the request, the engine, the field, what was expected and found.
    """
    if not isinstance(answer, Mapping):
        asked.broken("(whole)", "a JSON object", type(answer).__name__)
    meta = answer.get("meta_info")
    if not isinstance(meta, Mapping):
        asked.broken("meta_info", "a JSON object", meta)
    if meta.get("id") != asked.rid:
        asked.broken("meta_info.id", asked.rid, meta.get("id"))
    finish = meta.get("finish_reason")
    if not isinstance(finish, Mapping) or finish.get("type") not in ("stop", "length", "abort"):
        asked.broken("meta_info.finish_reason", "type 'stop', 'length' or 'abort'", finish)
    reason = str(finish["type"])
    code = finish.get("status_code")
    if reason == "abort" and isinstance(code, int) and code >= 400:
        asked.broken("meta_info.finish_reason", "an answer", finish)
    context = len(asked.request.tokens)
    from_queue = reason == "abort" and "prompt_tokens" not in meta
    if not from_queue and meta.get("prompt_tokens") != context:
        asked.broken("meta_info.prompt_tokens", context, meta.get("prompt_tokens"))
    tokens = _tokens(answer.get("output_ids"), asked)
    report = {key: value for key, value in meta.items() if key not in _ELSEWHERE}
    lacking = from_queue and any(key not in meta for key in _wanted(asked))
    if lacking and len(tokens):
        report["discarded_tokens"] = len(tokens)
        tokens = tokens[:0]
    new = len(tokens)
    if "completion_tokens" in meta and not lacking and meta["completion_tokens"] != new:
        asked.broken("meta_info.completion_tokens", new, meta["completion_tokens"])
    _check_end(reason, finish, tokens, asked)
    spans, unknown = _spans({} if lacking else meta, new, asked, steady)
    if new and unknown is not None:
        report["unknown_version"] = unknown
    log_probs = np.zeros(0, np.float32)
    top_p_ids = top_p_offsets = experts = indexed = None
    if new:
        log_probs = _log_probs(meta.get("output_token_logprobs"), tokens, asked)
        if asked.extras.sampling_mask(asked.params):
            # Those of the whole vocabulary, which the answer has too: float32, little-endian.
            whole = base64.b64encode(log_probs.astype("<f4").tobytes()).decode()
            report["full_log_probs_base64"] = whole
            log_probs, top_p_ids, top_p_offsets = _kept(meta, tokens, asked)
        if asked.extras.routed_experts:
            experts = decode_experts(meta.get("routed_experts"), new, asked)
        if asked.extras.indexer_topk:
            indexed = decode_indexer(meta.get("indexer_topk"), new, asked)
    cached = meta.get("cached_tokens")
    return GenerationResult(
        index=asked.request.index,
        tokens=tokens,
        log_probs=log_probs,
        sampler_log_probs=None,
        logprob_mode="processed" if asked.params.keeps_sets else "full",
        logprob_temperature=asked.params.logprob_temperature,
        finish_reason=reason,
        span_starts=spans[:, 0].astype(np.int32),
        span_ends=spans[:, 1].astype(np.int32),
        span_versions=spans[:, 2].copy(),
        expert_ids=experts,
        num_experts=asked.model.num_experts if experts is not None else 0,
        top_p_token_ids=top_p_ids,
        top_p_token_offsets=top_p_offsets,
        time_s=time_s,
        cached_tokens=cached if isinstance(cached, int) else None,
        request_id=asked.request.request_id or asked.rid,
        indexer_positions=indexed,
        report=report,
        engine_address=asked.address,
    )


def _wanted(asked: Asked) -> list[str]:
    names = ["output_token_logprobs"]
    names += ["routed_experts"] * asked.extras.routed_experts
    names += ["indexer_topk"] * asked.extras.indexer_topk
    names += ["output_token_sampling_mask"] * asked.extras.sampling_mask(asked.params)
    return names


def _tokens(said: object, asked: Asked) -> npt.NDArray[np.int32]:
    """[R] The sampled ids, each in the vocabulary."""
    if not isinstance(said, list):
        asked.broken("output_ids", "a list of token ids", said)
    if len(said) > asked.params.max_new_tokens:
        asked.broken("output_ids", f"at most {asked.params.max_new_tokens} ids", f"{len(said)} ids")
    inside = range(asked.model.vocab_size)
    if set(map(type, said)) - {int} or (said and not (min(said) in inside and max(said) in inside)):
        wrong = next(i for i, x in enumerate(said) if type(x) is not int or x not in inside)
        asked.broken(f"output_ids[{wrong}]", f"an id in [0, {len(inside)})", said[wrong])
    return np.array(said, dtype=np.int32)


def _check_end(
    reason: str, finish: Mapping[str, Any], tokens: npt.NDArray[np.int32], asked: Asked
) -> None:
    """The end is what the answer says it is."""
    new, limit = len(tokens), asked.params.max_new_tokens
    early = np.flatnonzero(np.isin(tokens[:-1], asked.params.stop_token_ids))
    if len(early):
        asked.broken(
            f"output_ids[{early[0]}]",
            "no stop id before the last token",
            f"{tokens[early[0]]} of {new} tokens",
        )
    if reason == "length" and new != limit:
        asked.broken(
            "meta_info.finish_reason",
            f"'length' after max_new_tokens = {limit} tokens",
            f"'length' after {new}",
            "the engine has a limit of its own (SGLANG_MAX_NEW_TOKENS_LIMIT, its KV cache)",
        )
    if reason != "stop":
        return
    matched = finish.get("matched")
    if not new or type(matched) is not int or matched != tokens[-1]:
        # "NaN happened": the sampled id was none, and the server put a stop id in its place.
        asked.broken(
            "meta_info.finish_reason.matched",
            f"the last token, {tokens[-1] if new else 'of which there is none'}",
            repr(matched),
        )


def _log_probs(
    said: object, tokens: npt.NDArray[np.int32], asked: Asked
) -> npt.NDArray[np.float32]:
    """[R] Of [[log-prob, id, text], …], whose ids are those of the answer."""
    field = "meta_info.output_token_logprobs"
    if not isinstance(said, list) or len(said) != len(tokens):
        found = f"{len(said)} entries" if isinstance(said, list) else said
        asked.broken(field, f"one entry for each of {len(tokens)} tokens", found)
    for position, (entry, token) in enumerate(zip(said, tokens.tolist(), strict=True)):
        if type(entry) is not list or len(entry) < 2 or entry[1] != token:
            asked.broken(f"{field}[{position}]", f"[log-prob, {token}, …]", entry)
    return _finite([entry[0] for entry in said], field, asked)


def _finite(values: list[Any], field: str, asked: Asked) -> npt.NDArray[np.float32]:
    """[R] The numbers of a list: none of them null, which is how JSON has NaN and infinities."""
    numbers = not set(map(type, values)) - {float, int}
    found = np.array(values if numbers else [], dtype=np.float64)
    if not numbers or not np.isfinite(found).all():
        bad = (i for i, x in enumerate(values) if type(x) not in (float, int) or not isfinite(x))
        wrong = next(bad)
        asked.broken(f"{field}[{wrong}]", "a finite log-probability", values[wrong])
    return found.astype(np.float32)


def _kept(
    meta: Mapping[str, Any], tokens: npt.NDArray[np.int32], asked: Asked
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """[R] log-probs over what top-p and top-k left; the ids they left, ascending; [R+1] offsets."""
    sets, said = (
        _sized(meta, f"output_token_sampling_{name}", len(tokens), asked)
        for name in ("mask", "logprobs")
    )
    ids: list[npt.NDArray[np.int32]] = []
    for position, (one, token) in enumerate(zip(sets, tokens.tolist(), strict=True)):
        field = f"meta_info.output_token_sampling_mask[{position}]"
        if not isinstance(one, list) or any(type(i) is not int for i in one) or token not in one:
            asked.broken(field, f"ids, the sampled one ({token}) among them", one)
        left = np.unique(np.array(one, dtype=np.int64))
        if left[0] < 0 or left[-1] >= asked.model.vocab_size or len(left) != len(one):
            asked.broken(field, f"different ids in [0, {asked.model.vocab_size})", one)
        ids.append(left.astype(np.int32))
    values = _finite(list(said), "meta_info.output_token_sampling_logprobs", asked)
    offsets = np.cumsum([0, *(len(one) for one in ids)], dtype=np.int32)
    return values, np.concatenate(ids), offsets


def _sized(meta: Mapping[str, Any], name: str, count: int, asked: Asked) -> Sequence[Any]:
    said = meta.get(name)
    if not isinstance(said, list) or len(said) != count:
        found = f"{len(said)} entries" if isinstance(said, list) else said
        asked.broken(
            f"meta_info.{name}",
            f"one entry for each of {count} tokens",
            found,
            "use a server that knows return_sampling_mask (sglang 0.5.23 does)",
        )
    return said


def _spans(
    meta: Mapping[str, Any], new: int, asked: Asked, steady: bool
) -> tuple[npt.NDArray[np.int64], str | None]:
    """[S, 3] Start, end and version of spans that cover all tokens; what was said of no version."""
    said = meta.get("weight_versions")
    field = "meta_info.weight_versions"
    if said is None:
        alone = meta.get("weight_version")
        said = [{"version": alone if steady else None, "start": 0, "end": new}]
        if alone is not None and not steady:
            said[0]["version"] = f"{alone} at the end"
    if not isinstance(said, list):
        asked.broken(field, "a list of spans", said)
    spans: list[tuple[int, int, int]] = []
    unknown: str | None = None
    for one in said:
        if not isinstance(one, Mapping) or any(
            type(one.get(key)) is not int for key in ("start", "end")
        ):
            asked.broken(field, "spans with start and end", one)
        start, end = one["start"], one["end"]
        if start == end:
            continue
        version = parse_version(one.get("version"))
        if version == UNKNOWN_VERSION:
            unknown = str(one["version"]) if one.get("version") is not None else "none"
        if spans and spans[-1][2] == version and spans[-1][1] == start:
            spans[-1] = (spans[-1][0], end, version)
        else:
            spans.append((start, end, version))
    starts, ends = [s for s, _, _ in spans], [e for _, e, _ in spans]
    if [*starts, new] != [0, *ends] or any(s > e for s, e, _ in spans):
        asked.broken(field, f"spans that cover [0, {new}) without a hole", said)
    return np.array(spans, dtype=np.int64).reshape(-1, 3), unknown
