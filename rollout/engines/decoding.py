"""The two passes over a causal model: sampling with a key-value cache, and scoring by a prefill."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ledger.errors import InvalidArgument, explain
from rollout.engines.routing import ExpertIds, RoutingRecorder
from rollout.protocol import GenerationRequest, SamplingParams
from rollout.sampling import kept_tokens, sample_tokens

__all__ = ["Decoded", "Scored", "decode_batch", "score_batch"]


@dataclass(frozen=True, slots=True, eq=False)
class Decoded:
    """What sampling gave for one request; R new tokens after a context of C."""

    tokens: npt.NDArray[np.int32]
    log_probs: npt.NDArray[np.float32]
    finish_reason: str
    expert_ids: ExpertIds | None
    expert_weights: npt.NDArray[np.float32] | None
    kept: list[npt.NDArray[np.int32]] | None = None
    """[R] The ids that top-p and top-k left at each token, ascending; None without them."""


@dataclass(frozen=True, slots=True, eq=False)
class Scored:
    """What a prefill gave for one sequence of T tokens."""

    log_probs: npt.NDArray[np.float32]
    """[T - 1] Entry t is the log-probability of token t + 1."""
    expert_ids: ExpertIds | None
    expert_weights: npt.NDArray[np.float32] | None


def _cache_name(model: Any) -> str:
    """The argument that carries the cache: it was renamed within transformers 5."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def _log_probs(
    logits: Tensor, tokens: Tensor, temperature: float, kept: Tensor | None = None
) -> Tensor:
    """Log-probabilities of `tokens` [...] under `logits` [..., V], in float32.

    Exactly what the trainer computes: the bits of both are compared. `kept` [..., V] (bool): of the
    distribution over these ids alone.
    """
    scaled = logits.float() / temperature
    if kept is not None:
        scaled = scaled.masked_fill(~kept, -torch.inf)
    return torch.log_softmax(scaled, dim=-1).gather(-1, tokens[..., None])[..., 0]


@torch.no_grad()
def decode_batch(
    model: Any,
    requests: Sequence[GenerationRequest],
    params: SamplingParams,
    *,
    pad_token_id: int,
    recorder: RoutingRecorder | None,
    aborted: Callable[[int], bool] | None = None,
) -> list[Decoded]:
    """Sample all requests together: left-padded, one cache, each row until its own end.

    `aborted(row)` is asked between tokens: a row of which it is true ends with what it has, perhaps
    nothing, and finish reason 'abort'.
    """
    device = model.device
    B, P, R = len(requests), max(len(r.tokens) for r in requests), params.max_new_tokens
    lengths = np.array([len(r.tokens) for r in requests], dtype=np.int64)
    seeds = np.array([r.seed for r in requests], dtype=np.int64)
    context = np.full((B, P), pad_token_id, dtype=np.int64)
    mask = np.zeros((B, P + R), dtype=np.int64)
    for row, request in enumerate(requests):
        context[row, P - lengths[row] :] = request.tokens
        mask[row, P - lengths[row] :] = 1
    mask_BT = torch.from_numpy(mask).to(device)
    # Samples of a group share their prompt: each different one is prefilled once, as one of U rows.
    first_of: dict[bytes, int] = {}
    own = [first_of.setdefault(r.tokens.tobytes(), row) for row, r in enumerate(requests)]
    firsts = list(first_of.values())
    prefilled_B = torch.tensor([firsts.index(row) for row in own], device=device)
    fed_BT = torch.from_numpy(context[firsts]).to(device)
    positions_BT = (mask_BT[firsts, :P].cumsum(1) - 1).clamp(min=0)
    length_B1 = torch.from_numpy(lengths).to(device)[:, None]
    stop = torch.tensor(params.stop_token_ids, dtype=torch.int64, device=device)

    tokens = np.zeros((B, R), dtype=np.int32)
    log_probs = np.zeros((B, R), dtype=np.float32)
    new = np.full(B, R, dtype=np.int64)
    done, cut = np.zeros(B, dtype=bool), np.zeros(B, dtype=bool)
    ids: list[ExpertIds] = []
    weights: list[npt.NDArray[np.float32]] = []
    kept: list[list[npt.NDArray[np.int32]]] = [[] for _ in range(B)]
    cache_name, cache = _cache_name(model), None
    for t in range(R):
        if aborted is not None:
            told = ~done & np.array([aborted(row) for row in range(B)])
            new[told] = t
            cut |= told
            done |= told
            if done.all():
                break
        output = model(
            input_ids=fed_BT,
            attention_mask=mask_BT[firsts, :P] if cache is None else mask_BT[:, : P + t],
            position_ids=positions_BT,
            use_cache=True,
            logits_to_keep=1,
            **({} if cache is None else {cache_name: cache}),
        )
        logits_BV = output.logits[:, -1].float()
        spread = cache is None
        cache = getattr(output, cache_name)
        if spread:
            cache.batch_select_indices(prefilled_B)
            logits_BV = logits_BV[prefilled_B]
        if recorder is not None:
            step_ids, step_weights = recorder.take(len(fed_BT))
            pick = prefilled_B.cpu().numpy() if spread else slice(None)
            ids.append(step_ids[pick])
            if step_weights is not None:
                weights.append(step_weights[pick])
        chosen_B = sample_tokens(
            logits_BV,
            seeds,
            lengths + t,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
        )
        tokens[:, t] = chosen_B.cpu().numpy()
        kept_BV = None
        if params.keeps_sets:
            kept_BV = kept_tokens(
                logits_BV, temperature=params.temperature, top_p=params.top_p, top_k=params.top_k
            )
            for row, kept_V in enumerate(kept_BV.cpu().numpy()):
                kept[row].append(np.flatnonzero(kept_V).astype(np.int32))
        log_probs[:, t] = (
            _log_probs(logits_BV, chosen_B, params.logprob_temperature, kept_BV).cpu().numpy()
        )
        ended = torch.isin(chosen_B, stop).cpu().numpy() & ~done
        new[ended] = t + 1
        done |= ended
        if done.all():
            break
        # A finished row stays in the batch, so that its shape, and so the bits, do not depend on
        # which rows finish first. What it says after its end is cut off below.
        fed_BT, positions_BT = chosen_B[:, None], length_B1 + t
    stitched_ids = np.concatenate(ids, axis=1) if ids else None
    stitched_weights = np.concatenate(weights, axis=1) if weights else None

    def rows_of(whole: Any, row: int) -> Any:
        # The left padding goes; the last token was never fed.
        return None if whole is None else whole[row, P - lengths[row] : P + new[row] - 1].copy()

    return [
        Decoded(
            tokens=tokens[row, : new[row]].copy(),
            log_probs=log_probs[row, : new[row]].copy(),
            finish_reason="abort" if cut[row] else "stop" if done[row] else "length",
            expert_ids=rows_of(stitched_ids, row),
            expert_weights=rows_of(stitched_weights, row),
            kept=kept[row][: new[row]] if params.keeps_sets else None,
        )
        for row in range(B)
    ]


@torch.no_grad()
def score_batch(
    model: Any,
    sequences: Sequence[npt.NDArray[np.int32]],
    *,
    rows: int,
    width: int,
    temperature: float,
    pad_token_id: int,
    recorder: RoutingRecorder | None,
    kept: Sequence[Sequence[npt.NDArray[np.int32]]] | None = None,
) -> list[Scored]:
    """Score finished sequences by one forward over a batch of exactly [rows, width], right-padded.

    `kept`: for each sequence the sets of its last tokens, which log-probs are then restricted to.

    `len(sequences)` may be below `rows`: the rest is padding. The bits of a result depend on the
    shape, not (for dense models) on what the other rows hold.

    Raises:
        InvalidArgument: a sequence is longer than `width`.
    """
    batch = np.full((rows, width), pad_token_id, dtype=np.int64)
    for row, sequence in enumerate(sequences):
        if len(sequence) > width:
            raise InvalidArgument(
                explain(
                    "scoring a finished sequence",
                    on=f"row {row} of the batch",
                    expected=f"at most --seq-length = {width} tokens",
                    found=f"{len(sequence)} tokens",
                    do="raise --seq-length to the longest prompt plus --rollout-max-response-len",
                )
            )
        batch[row, : len(sequence)] = sequence
    tokens_BT = torch.from_numpy(batch).to(model.device)
    positions_BT = torch.arange(width, device=model.device).expand(rows, width)
    logits_BTV = model(input_ids=tokens_BT, position_ids=positions_BT, use_cache=False).logits
    kept_BTV = None
    if kept is not None:
        kept_BTV = torch.ones(logits_BTV[:, :-1].shape, dtype=torch.bool, device=model.device)
        for row, (sequence, sets) in enumerate(zip(sequences, kept, strict=True)):
            first = len(sequence) - len(sets) - 1
            for t, left in enumerate(sets):
                kept_BTV[row, first + t] = False
                kept_BTV[row, first + t, torch.from_numpy(left).long()] = True
    found = _log_probs(logits_BTV[:, :-1], tokens_BT[:, 1:], temperature, kept_BTV).cpu().numpy()
    ids, weights = (None, None) if recorder is None else recorder.take(rows)
    return [
        Scored(
            log_probs=found[row, : len(sequence) - 1].copy(),
            expert_ids=None if ids is None else ids[row, : len(sequence) - 1].copy(),
            expert_weights=None if weights is None else weights[row, : len(sequence) - 1].copy(),
        )
        for row, sequence in enumerate(sequences)
    ]
