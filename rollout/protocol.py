"""What an engine is asked, what it answers, and what it must promise.

Token ids go in and token ids come out; text never does. Every engine passes the contract suite
`tests/rollout/engine_contract.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from ledger.errors import InvalidArgument, explain

if TYPE_CHECKING:
    from ledger.weights import TensorRecord

__all__ = [
    "AsyncEngine",
    "Engine",
    "GenerationRequest",
    "GenerationResult",
    "SamplingParams",
    "check_request",
    "nothing_sampled",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen, the same for every request of a call.

    Raises InvalidArgument where a value is out of its range.
    """

    temperature: float = 1.0
    """Divides the logits; 0 is greedy."""
    top_p: float = 1.0
    """Nucleus mass in (0, 1]; 1.0 is off."""
    top_k: int = -1
    """Number of candidates; -1 is off."""
    max_new_tokens: int = 16
    stop_token_ids: tuple[int, ...] = ()
    """Any of them ends the generation; it is part of the response."""
    logprob_mode: str = "full"
    """'full': log-probs of the whole vocabulary's distribution. 'processed': of what top-p and
    top-k left, and where they cut anything, the ids that they left are reported too."""

    def __post_init__(self) -> None:
        """Check the ranges."""
        for name, good, expected in (
            ("temperature", 0 <= self.temperature < float("inf"), "0 (greedy) or above"),
            ("top_p", 0 < self.top_p <= 1, "above 0, up to 1"),
            ("top_k", self.top_k == -1 or self.top_k >= 1, "-1 (off) or at least 1"),
            ("max_new_tokens", self.max_new_tokens >= 1, "at least 1"),
            ("logprob_mode", self.logprob_mode in ("full", "processed"), "'full' or 'processed'"),
        ):
            if not good:
                raise InvalidArgument(
                    explain(
                        "checking the sampling parameters",
                        on=name,
                        expected=expected,
                        found=getattr(self, name),
                    )
                )

    @property
    def keeps_sets(self) -> bool:
        """Whether log-probs are of a distribution that top-p or top-k cut."""
        cuts = self.temperature > 0 and (self.top_p < 1 or self.top_k > 0)
        return cuts and self.logprob_mode == "processed"

    @property
    def logprob_temperature(self) -> float:
        """What logits are divided by before log-probabilities are taken: 1.0 where greedy."""
        return self.temperature if self.temperature > 0 else 1.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GenerationRequest:
    """One sample to continue."""

    index: int
    """The sample; only carried through."""
    tokens: npt.NDArray[np.int32]
    """[C] Everything before the new tokens: prompt, and what earlier turns added."""
    seed: int
    """In [0, 2**63). The choice at a position is a function of this seed and that position."""
    request_id: str | None = None
    """The request's name at the engine, unique in the run; the same where it is sent again."""
    session_id: str | None = None
    """Requests of one session go to the same of several engines, for its prefix cache."""
    routing_start: int = 0
    """Experts, and indexed positions, are reported from this position of the sequence on: what is
    before it is recorded already. At most C."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GenerationResult:
    """The answer to one request. R is the number of new tokens, C + R that of all."""

    index: int
    tokens: npt.NDArray[np.int32]
    """[R] New token ids, the stop id included."""
    log_probs: npt.NDArray[np.float32]
    """[R] Natural log-probability of each new token; see `logprob_mode`."""
    sampler_log_probs: npt.NDArray[np.float32] | None
    """[R] What the sampler saw, where `log_probs` were recomputed by a prefill; else None."""
    logprob_mode: str
    """'full': of the whole vocabulary's distribution; 'processed': after top-p and top-k."""
    logprob_temperature: float
    finish_reason: str
    """'stop', 'length' or 'abort'."""
    span_starts: npt.NDArray[np.int32]
    """[S] First token (offset among the new ones) of each weight-version span."""
    span_ends: npt.NDArray[np.int32]
    """[S] One past the last token of each span."""
    span_versions: npt.NDArray[np.int64]
    """[S] Version of each span; `ledger.events.UNKNOWN_VERSION` where the engine does not know."""
    expert_ids: npt.NDArray[np.uint8] | npt.NDArray[np.uint16] | None = None
    """[C + R - 1 - routing_start, layers, topk] Experts of every token that was fed, from the
    request's `routing_start` on; None for dense models."""
    expert_weights: npt.NDArray[np.float32] | None = None
    """[C + R - 1 - routing_start, layers, topk] Gate weights, where asked for."""
    num_experts: int = 0
    top_p_token_ids: npt.NDArray[np.int32] | None = None
    """The ids that top-p and top-k left at each new token, one set after the other; None where
    `log_probs` are 'full'."""
    top_p_token_offsets: npt.NDArray[np.int32] | None = None
    """[R+1] Where each token's set begins in `top_p_token_ids`."""
    batch_rows: int | None = None
    """Rows of the batch in which `log_probs` were computed."""
    batch_width: int | None = None
    """Tokens a row of that batch, padding included."""
    time_s: float = 0.0
    """Seconds of the whole call (shared by its batch)."""
    cached_tokens: int | None = None
    request_id: str | None = None
    indexer_positions: npt.NDArray[np.int32] | None = None
    """[C + R - 1 - routing_start, layers, topk] What sparse attention chose; None: it has none."""
    report: Mapping[str, Any] | None = None
    """What else the answer said, as JSON can hold it."""
    engine_address: str | None = None
    """Which of several engines answered."""


class Engine(Protocol):
    """Samples from a policy, and takes new weights behind a barrier."""

    name: str
    version: str

    @property
    def weight_version(self) -> int:
        """The version that is loaded; UNKNOWN_VERSION where nobody has named it."""

    def generate(
        self, requests: Sequence[GenerationRequest], params: SamplingParams
    ) -> list[GenerationResult]:
        """Continue every request; results in the order of the requests.

        The same requests, in the same order, with the same weights give the same result, bit for
        bit. Nothing is generated when a request is refused.

        Raises:
            InvalidArgument: a request that the model cannot take.
            Conflict: the engine is paused for an update, or a half-done update left it unusable.
        """

    def update_weights(self, version: int, named: Iterable[tuple[str, Any]]) -> list[TensorRecord]:
        """Pause, load `named` (canonical Hugging Face names, torch tensors), checksum, stay paused.

        Returns records computed from the engine's own parameters, sorted by name. The caller
        compares them with what was published and calls `release(version)`.

        Raises:
            InvalidArgument: a name, shape or dtype does not fit. The old weights stay and are
                served, under their old version.
        """

    def release(self, version: int) -> None:
        """Let requests run again, under `version`.

        Raises:
            Conflict: `version` is not the one that was loaded.
        """

    def close(self) -> None:
        """Free everything. The engine cannot be used afterwards."""


class AsyncEngine(Protocol):
    """As `Engine`, one sample a call, many calls at a time. All of one event loop."""

    name: str
    version: str

    @property
    def weight_version(self) -> int:
        """The version that new requests are served with; UNKNOWN_VERSION: nobody has named it."""

    async def generate(
        self, request: GenerationRequest, params: SamplingParams
    ) -> GenerationResult:
        """Continue one sample.

        An abort, of this request or of all, ends it with finish reason 'abort' and what was
        sampled until then, perhaps nothing. Cancelling the caller aborts the request too.

        Raises:
            InvalidArgument: a request that the model cannot take; nothing was sent.
            EngineFailed: no engine gave an answer that keeps its promises, tries again included.
        """

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """End the requests of these names; None: all that run. Unknown names are passed over."""

    async def update_weights(
        self, version: int, named: Iterable[tuple[str, Any]]
    ) -> list[TensorRecord]:
        """As `Engine.update_weights`: afterwards no request runs until `release`.

        What happens to running requests (they go on later, or are aborted) is the engine's pause
        mode; in either case the spans of their answers say which version sampled each token.
        """

    async def release(self, version: int) -> None:
        """As `Engine.release`."""

    async def close(self) -> None:
        """Free everything. Requests that still run raise EngineFailed."""


def check_request(
    request: GenerationRequest, params: SamplingParams, *, vocab_size: int, max_positions: int
) -> None:
    """Refuse a request that would crash an engine or silently give nonsense.

    Raises:
        InvalidArgument: empty context, ids outside the vocabulary, or too long for the model.
    """
    tokens = request.tokens
    on = f"sample {request.index}"
    if tokens.ndim != 1 or len(tokens) == 0:
        raise InvalidArgument(
            explain(
                "checking a generation request",
                on=on,
                expected="a one-dimensional context of at least one token",
                found=f"shape {tokens.shape}",
                do="give the prompt at least one token (for example the start token)",
            )
        )
    outside = np.flatnonzero((tokens < 0) | (tokens >= vocab_size))
    if len(outside):
        raise InvalidArgument(
            explain(
                "checking a generation request",
                on=f"{on}, position {outside[0]}",
                expected=f"token ids in [0, {vocab_size})",
                found=int(tokens[outside[0]]),
                do="check that the tokenizer belongs to this model",
            )
        )
    if len(tokens) + params.max_new_tokens > max_positions:
        raise InvalidArgument(
            explain(
                "checking a generation request",
                on=on,
                expected=f"context + max_new_tokens within the model's {max_positions} positions",
                found=f"{len(tokens)} + {params.max_new_tokens}",
                do="shorten the prompt or lower --rollout-max-response-len",
            )
        )
    if not 0 <= request.seed < 2**63:
        raise InvalidArgument(
            explain(
                "checking a generation request",
                on=f"{on}, seed",
                expected="in [0, 2**63)",
                found=request.seed,
            )
        )


def nothing_sampled(
    request: GenerationRequest, params: SamplingParams, *, request_id: str | None = None
) -> GenerationResult:
    """The answer to a request that was aborted before its first token."""
    return GenerationResult(
        index=request.index,
        tokens=np.zeros(0, np.int32),
        log_probs=np.zeros(0, np.float32),
        sampler_log_probs=None,
        logprob_mode="processed" if params.keeps_sets else "full",
        logprob_temperature=params.logprob_temperature,
        finish_reason="abort",
        span_starts=np.zeros(0, np.int32),
        span_ends=np.zeros(0, np.int32),
        span_versions=np.zeros(0, np.int64),
        request_id=request.request_id if request_id is None else request_id,
    )
