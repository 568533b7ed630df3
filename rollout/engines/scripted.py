"""An engine without a model, for tests of what stands around engines. Never for training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ledger.errors import Conflict, InvalidArgument, explain
from ledger.events import UNKNOWN_VERSION
from rollout.protocol import GenerationRequest, GenerationResult, SamplingParams, check_request
from rollout.sampling import uniforms

if TYPE_CHECKING:
    from ledger.weights import TensorRecord

__all__ = ["Script", "ScriptedEngine", "uniform_script"]

Script = Callable[
    [GenerationRequest, SamplingParams], tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]
]
"""What to say to a request: ids and log-probs, cut at the first stop id and at max_new_tokens."""


def uniform_script(vocab_size: int) -> Script:
    """Every id equally likely, chosen by (seed, position)."""

    def script(
        request: GenerationRequest, params: SamplingParams
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        positions = len(request.tokens) + np.arange(params.max_new_tokens, dtype=np.int64)
        numbers = uniforms(np.full(len(positions), request.seed, dtype=np.int64), positions)
        log_probs = np.full(len(positions), -np.log(vocab_size), dtype=np.float32)
        return (numbers * vocab_size).astype(np.int32), log_probs

    return script


class ScriptedEngine:
    """Says what its script says, under the full engine contract."""

    name = "scripted"
    version = "1"

    def __init__(
        self,
        script: Script | None = None,
        *,
        vocab_size: int = 64,
        max_positions: int = 1024,
        weights: Mapping[str, npt.NDArray[Any]] | None = None,
        weight_version: int = UNKNOWN_VERSION,
    ) -> None:
        """`weights` by name take part in updates only."""
        self.vocab_size, self.max_positions = vocab_size, max_positions
        self.calls = 0
        """Calls of `generate` that were not refused."""
        self._script = script or uniform_script(vocab_size)
        self._weights = {name: np.array(value) for name, value in (weights or {}).items()}
        self._weight_version = weight_version
        self._paused: str | None = None

    @property
    def weight_version(self) -> int:
        """The version that is loaded."""
        return self._weight_version

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        params: SamplingParams,
        *,
        aborted: Callable[[int], bool] | None = None,
    ) -> list[GenerationResult]:
        """Answer from the script; see `rollout.protocol.Engine`. Aborts come too late for it."""
        for request in requests:
            check_request(
                request, params, vocab_size=self.vocab_size, max_positions=self.max_positions
            )
        if self._paused is not None:
            raise Conflict(
                explain("generating", on=f"engine {self.name}", found=self._paused, do="release it")
            )
        self.calls += 1
        return [self._answer(request, params) for request in requests]

    def _answer(self, request: GenerationRequest, params: SamplingParams) -> GenerationResult:
        tokens, log_probs = self._script(request, params)
        ends = np.flatnonzero(np.isin(tokens, params.stop_token_ids))
        new = int(ends[0]) + 1 if len(ends) else len(tokens)
        finish_reason = "stop" if len(ends) and new <= params.max_new_tokens else "length"
        new = min(new, params.max_new_tokens)
        return GenerationResult(
            index=request.index,
            tokens=tokens[:new].astype(np.int32),
            log_probs=log_probs[:new].astype(np.float32),
            sampler_log_probs=None,
            logprob_mode="full",
            logprob_temperature=params.logprob_temperature,
            finish_reason=finish_reason,
            span_starts=np.array([0], dtype=np.int32),
            span_ends=np.array([new], dtype=np.int32),
            span_versions=np.array([self._weight_version], dtype=np.int64),
        )

    def update_weights(self, version: int, named: Iterable[tuple[str, Any]]) -> list[TensorRecord]:
        """Take arrays or CPU tensors of the same names, shapes and dtypes, and stay paused."""
        from ledger.weights import tensor_record

        new = {name: np.ascontiguousarray(np.asarray(value)) for name, value in named}
        wrong = sorted(new.keys() ^ self._weights.keys()) or [
            name
            for name, old in self._weights.items()
            if (old.shape, old.dtype) != (new[name].shape, new[name].dtype)
        ]
        if wrong:
            raise InvalidArgument(
                explain(
                    "loading weights into the engine",
                    on=wrong[0],
                    expected={name: value.shape for name, value in self._weights.items()},
                    found={name: value.shape for name, value in new.items()},
                )
            )
        self._weights = {name: value.copy() for name, value in new.items()}
        self._weight_version = version
        self._paused = f"paused: version {version} is loaded and waits for release"
        return [
            tensor_record(name, value.dtype.name, value.shape, value)
            for name, value in sorted(self._weights.items())
        ]

    def release(self, version: int) -> None:
        """Serve again; see `rollout.protocol.Engine`."""
        if version != self._weight_version:
            raise Conflict(
                explain(
                    "releasing the engine",
                    on=f"engine {self.name}",
                    expected=f"the loaded version {self._weight_version}",
                    found=version,
                )
            )
        self._paused = None

    def close(self) -> None:
        """Refuse everything from now on."""
        self._paused = "closed"
