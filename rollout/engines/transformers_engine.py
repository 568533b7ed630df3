"""The embedded engine: `transformers` in this process, on the CPU or one GPU."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ledger.errors import Conflict, InvalidArgument, explain
from ledger.events import UNKNOWN_VERSION
from rollout.engines.decoding import Decoded, Scored, decode_batch, score_batch
from rollout.engines.loading import load_model
from rollout.engines.parameters import canonical_views, check_named, record_views
from rollout.engines.routing import RoutingRecorder, count_experts
from rollout.protocol import GenerationRequest, GenerationResult, SamplingParams, check_request

if TYPE_CHECKING:
    from ledger.weights import TensorRecord

__all__ = ["TransformersEngine"]


class TransformersEngine:
    """Samples from a Hugging Face folder.

    A call's requests are cut, in order, into batches of at most `max_batch_rows`: that composition,
    the weights and the thread count decide every bit of the answer.

    With `recompute_logprobs_via_prefill` the log-probabilities (and the routing) come from one more
    forward over the finished sequences in batches of exactly [micro_batch_rows, seq_length]; the
    sampler's own are kept beside them. A trainer that runs the same shape gets the same bits for
    dense models, which decoding with a cache does not give.
    """

    name = "transformers"

    def __init__(
        self,
        model_dir: str | Path,
        *,
        dtype: str = "float32",
        device: str = "cpu",
        attn_implementation: str = "eager",
        experts_implementation: str = "grouped_mm",
        max_batch_rows: int = 256,
        recompute_logprobs_via_prefill: bool = False,
        micro_batch_rows: int = 8,
        seq_length: int | None = None,
        record_expert_weights: bool = False,
        weight_version: int = UNKNOWN_VERSION,
    ) -> None:
        """Load the model of `model_dir`.

        `attn_implementation` 'eager' computes attention as Megatron's local one does; 'sdpa' is
        faster. `seq_length` None: the longest sequence of each call. `record_expert_weights` keeps
        the gate weights too.

        Raises:
            NotFound, Corrupt, InvalidArgument: as `rollout.engines.loading.load_model`.
            InvalidArgument: an option that cannot work, or routers that are not recognised.
        """
        import transformers

        for option, value in (
            ("max_batch_rows", max_batch_rows),
            ("micro_batch_rows", micro_batch_rows),
            ("seq_length", 1 if seq_length is None else seq_length),
        ):
            if value < 1:
                raise InvalidArgument(
                    explain("loading a model", on=option, expected="at least 1", found=value)
                )
        self.version = transformers.__version__
        model = load_model(
            Path(model_dir), dtype=getattr(torch, dtype), attn_implementation=attn_implementation
        )
        self._model: Any = model.to(device).eval()
        config = self._model.config
        self.vocab_size = int(config.vocab_size)
        self.max_positions = int(config.max_position_embeddings)
        self.num_experts = count_experts(config)
        self._recorder: RoutingRecorder | None = None
        if self.num_experts:
            self._model.set_experts_implementation(experts_implementation)
            self._recorder = RoutingRecorder(
                self._model, self.num_experts, keep_weights=record_expert_weights
            )
        pad = config.pad_token_id
        self._pad_token_id = int(pad) if isinstance(pad, int) and pad >= 0 else 0
        self._max_batch_rows = max_batch_rows
        self._recompute = recompute_logprobs_via_prefill
        self._micro_batch_rows = micro_batch_rows
        self._seq_length = seq_length
        self._views = canonical_views(self._model)
        self._weight_version = weight_version
        self._lock = threading.Lock()
        self._paused: str | None = None
        self._half_done = False
        if self._recorder is not None:
            # A forward of one token: routers of another shape are refused now, not mid-run.
            self._score([np.zeros(2, dtype=np.int32)], SamplingParams(), rows=1, width=2)

    @property
    def weight_version(self) -> int:
        """The version that is loaded; UNKNOWN_VERSION until someone names it."""
        return self._weight_version

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        params: SamplingParams,
        *,
        aborted: Callable[[int], bool] | None = None,
    ) -> list[GenerationResult]:
        """Continue every request; see `rollout.protocol.Engine`.

        `aborted(i)` is asked between tokens, from the calling thread: where it is true, request
        number i ends with what it has, and finish reason 'abort'.
        """
        for request in requests:
            check_request(
                request, params, vocab_size=self.vocab_size, max_positions=self.max_positions
            )
        with self._lock:
            if self._paused is not None:
                raise Conflict(
                    explain(
                        "generating",
                        on=f"engine {self.name}",
                        expected="an engine that serves",
                        found=self._paused,
                        do="call release(version) after a finished update",
                    )
                )
            began = time.perf_counter()
            decoded: list[Decoded] = []
            shapes: list[tuple[int, int]] = []
            for first in range(0, len(requests), self._max_batch_rows):
                chunk = requests[first : first + self._max_batch_rows]
                part = self._decode(chunk, params, first, aborted)
                width = max(len(r.tokens) for r in chunk) + max(len(d.tokens) for d in part)
                decoded += part
                shapes += [(len(chunk), width)] * len(chunk)
            scored: list[Scored] | None = None
            if self._recompute and requests:
                sequences = [
                    np.concatenate([r.tokens, d.tokens])
                    for r, d in zip(requests, decoded, strict=True)
                ]
                width = self._seq_length or max(len(s) for s in sequences)
                scored = self._score(
                    sequences,
                    params,
                    rows=self._micro_batch_rows,
                    width=width,
                    kept=[d.kept or [] for d in decoded] if params.keeps_sets else None,
                )
                shapes = [(self._micro_batch_rows, width)] * len(requests)
            time_s = time.perf_counter() - began
        return [
            self._result(
                request,
                decoded[i],
                None if scored is None else scored[i],
                shapes[i],
                params,
                time_s,
            )
            for i, request in enumerate(requests)
        ]

    def _decode(
        self,
        chunk: Sequence[GenerationRequest],
        params: SamplingParams,
        first: int,
        aborted: Callable[[int], bool] | None,
    ) -> list[Decoded]:
        with self._recorder.recording() if self._recorder else contextlib.nullcontext():
            return decode_batch(
                self._model,
                chunk,
                params,
                pad_token_id=self._pad_token_id,
                recorder=self._recorder,
                aborted=None if aborted is None else lambda row: aborted(first + row),
            )

    def _score(
        self,
        sequences: Sequence[Any],
        params: SamplingParams,
        *,
        rows: int,
        width: int,
        kept: Sequence[Sequence[Any]] | None = None,
    ) -> list[Scored]:
        scored: list[Scored] = []
        with self._recorder.recording() if self._recorder else contextlib.nullcontext():
            for first in range(0, len(sequences), rows):
                scored += score_batch(
                    self._model,
                    sequences[first : first + rows],
                    rows=rows,
                    width=width,
                    temperature=params.logprob_temperature,
                    pad_token_id=self._pad_token_id,
                    recorder=self._recorder,
                    kept=None if kept is None else kept[first : first + rows],
                )
        return scored

    def _result(
        self,
        request: GenerationRequest,
        decoded: Decoded,
        scored: Scored | None,
        shape: tuple[int, int],
        params: SamplingParams,
        time_s: float,
    ) -> GenerationResult:
        new, start = len(decoded.tokens), request.routing_start
        routing: Decoded | Scored = decoded if scored is None else scored
        return GenerationResult(
            index=request.index,
            tokens=decoded.tokens,
            log_probs=decoded.log_probs
            if scored is None
            else scored.log_probs[len(scored.log_probs) - new :],
            sampler_log_probs=None if scored is None else decoded.log_probs,
            logprob_mode="processed" if params.keeps_sets else "full",
            logprob_temperature=params.logprob_temperature,
            top_p_token_ids=None
            if decoded.kept is None
            else np.concatenate([np.zeros(0, np.int32), *decoded.kept]),
            top_p_token_offsets=None
            if decoded.kept is None
            else np.cumsum([0, *(len(ids) for ids in decoded.kept)], dtype=np.int32),
            finish_reason=decoded.finish_reason,
            span_starts=np.array([0][:new], dtype=np.int32),
            span_ends=np.array([new][:new], dtype=np.int32),
            span_versions=np.array([self._weight_version][:new], dtype=np.int64),
            expert_ids=None if routing.expert_ids is None else routing.expert_ids[start:],
            expert_weights=None
            if routing.expert_weights is None
            else routing.expert_weights[start:],
            num_experts=self.num_experts,
            batch_rows=shape[0],
            batch_width=shape[1],
            time_s=time_s,
        )

    @torch.no_grad()
    def update_weights(
        self, version: int, named: Iterable[tuple[str, Tensor]]
    ) -> list[TensorRecord]:
        """Load new weights in place and stay paused; see `rollout.protocol.Engine`."""
        new = dict(named)
        with self._lock:
            check_named(self._views, new)
            self._paused = f"an update to version {version} that has not finished"
            self._half_done = True
            for name, view in self._views.items():
                view.copy_(new[name])
            records = record_views(self._views)
            self._weight_version, self._half_done = version, False
            self._paused = f"paused: version {version} is loaded and waits for release"
            return records

    def release(self, version: int) -> None:
        """Serve again; see `rollout.protocol.Engine`."""
        with self._lock:
            if self._half_done or version != self._weight_version:
                loaded = f"the loaded version {self._weight_version}"
                raise Conflict(
                    explain(
                        "releasing the engine",
                        on=f"engine {self.name}",
                        expected="a finished update" if self._half_done else loaded,
                        found=self._paused if self._half_done else version,
                        do="load that version with update_weights first",
                    )
                )
            self._paused = None

    def weight_records(self) -> list[TensorRecord]:
        """Checksums of the engine's own parameters, by canonical name."""
        with self._lock:
            return record_views(self._views)

    def close(self) -> None:
        """Free the model."""
        with self._lock:
            if self._recorder is not None:
                self._recorder.close()
            self._paused = "closed"
            self._views = {}
            self._model = None
