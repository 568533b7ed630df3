"""What a custom generate function returned, checked and laid over what is recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from rollout.trajectory import Segment, Trajectory

__all__ = ["Returned", "ReturnedWrong", "Run", "as_list", "check", "left", "matching"]


class ReturnedWrong(Exception):
    """A custom function returned something that cannot be recorded: its samples failed."""


@dataclass(frozen=True, slots=True, eq=False)
class Returned:
    """One returned sample. T tokens, of which the last R are the response."""

    sample: Any
    """As it came: slime's `Sample`, or an object with its attributes."""
    tokens: npt.NDArray[np.int32]
    """[T]"""
    response_length: int
    sampled: npt.NDArray[np.bool_]
    """[R] Whether each token of the response was sampled, by `loss_mask`."""
    log_probs: npt.NDArray[np.float32] | None
    """[R] None: the function did not keep them."""
    status: str

    @property
    def prompt(self) -> npt.NDArray[np.int32]:
        """[T − R]"""
        return self.tokens[: len(self.tokens) - self.response_length]


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """n tokens of a response that were all sampled, or all not."""

    tokens: npt.NDArray[np.int32]
    sampled: bool
    log_probs: npt.NDArray[np.float32] | None
    """[n] Of sampled ones, where the function kept them."""


def as_list(found: object, on: str) -> list[Any]:
    """A sample or a list of them as a list. Raises ReturnedWrong for anything else."""
    samples = list(found) if isinstance(found, (list, tuple)) else [found]
    wanted = ("tokens", "response_length", "status")
    for one in samples:
        if isinstance(one, (list, tuple)) or not all(hasattr(one, name) for name in wanted):
            raise ReturnedWrong(
                f"{on} returned {type(one).__name__}; a Sample or a list of them is expected"
            )
    if not samples:
        raise ReturnedWrong(f"{on} returned no sample")
    return samples


def check(sample: Any, *, vocab_size: int, on: str) -> Returned:
    """Check lengths, ranges and marks of a returned sample.

    Raises ReturnedWrong: tokens outside [0, vocab_size), no prompt or no response, a mask or
    log-probs of another length, a mask of something else than 0 and 1, a log-prob that is none.
    """
    tokens = _ids(sample.tokens, vocab_size, on)
    size = sample.response_length
    if isinstance(size, bool) or not isinstance(size, (int, np.integer)):
        raise ReturnedWrong(f"{on}: response_length is {size!r}, no number of tokens")
    if not 0 < size < len(tokens):
        raise ReturnedWrong(
            f"{on}: response_length {size} of {len(tokens)} tokens; a prompt and a response "
            "are expected"
        )
    mask = getattr(sample, "loss_mask", None)
    sampled = np.ones(size, bool)
    if mask is not None:
        given = np.asarray(mask)
        if given.shape != (size,) or not np.isin(given, (0, 1)).all():
            raise ReturnedWrong(
                f"{on}: loss_mask of shape {given.shape}; one 0 or 1 for each of {size} response "
                "tokens is expected"
            )
        sampled = given.astype(bool)
    if not sampled.any():
        raise ReturnedWrong(f"{on}: loss_mask is 0 everywhere: nothing was sampled")
    log_probs = _log_probs(getattr(sample, "rollout_log_probs", None), sampled, on)
    status = getattr(sample.status, "value", sample.status)
    return Returned(sample, tokens, int(size), sampled, log_probs, str(status))


def _ids(tokens: Any, vocab_size: int, on: str) -> npt.NDArray[np.int32]:
    try:
        found = np.asarray(tokens)
    except ValueError as error:
        raise ReturnedWrong(f"{on}: tokens are no list of ids ({error})") from error
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise ReturnedWrong(f"{on}: tokens of type {found.dtype} and shape {found.shape}, no ids")
    outside = np.flatnonzero((found < 0) | (found >= vocab_size))
    if len(outside):
        at = int(outside[0])
        raise ReturnedWrong(f"{on}: token {found[at]} at {at}, outside [0, {vocab_size})")
    return found.astype(np.int32)


def _log_probs(
    given: Any, sampled: npt.NDArray[np.bool_], on: str
) -> npt.NDArray[np.float32] | None:
    if given is None:
        return None
    try:
        found = np.asarray(given, dtype=np.float32)
    except (TypeError, ValueError) as error:
        raise ReturnedWrong(f"{on}: rollout_log_probs are no numbers ({error})") from error
    if found.shape != sampled.shape:
        raise ReturnedWrong(
            f"{on}: rollout_log_probs of shape {found.shape} for {len(sampled)} response tokens"
        )
    # The sum of probabilities may round to a little more than 1.
    wrong = np.flatnonzero(sampled & ~(found <= 1e-3))
    if len(wrong) or not np.isfinite(found[sampled]).all():
        at = int(wrong[0]) if len(wrong) else int(np.flatnonzero(~np.isfinite(found) & sampled)[0])
        raise ReturnedWrong(f"{on}: log-prob {found[at]} of response token {at}")
    return found


def matching(one: Returned, recorded: Sequence[Trajectory]) -> Trajectory | None:
    """The recorded sample that a returned one is, or goes on from: its longest beginning."""
    found: Trajectory | None = None
    size = -1
    for at in recorded:
        context = at.context()
        begins = len(context) <= len(one.tokens) and at.sampled_tokens > 0
        if begins and len(context) > size and np.array_equal(context, one.tokens[: len(context)]):
            found, size = at, len(context)
    return found


def left(one: Returned, at: Trajectory, on: str) -> list[Run]:
    """What a returned sample has behind the recorded `at`, which is its beginning.

    Raises ReturnedWrong where the two do not say the same of what was sampled.
    """
    size = len(at.prompt_tokens) + at.response_length
    sampled, log_probs = _recorded(at)
    offset = len(one.tokens) - one.response_length
    said = np.zeros(len(one.tokens), bool)
    said[offset:] = one.sampled
    differs = np.flatnonzero(said[:size] != sampled)
    if len(differs):
        where = int(differs[0])
        raise ReturnedWrong(
            f"{on}: loss_mask says of token {where} that it was "
            + ("sampled, and nobody sampled it" if said[where] else "not sampled, and it was: ")
            + ("" if said[where] else "leave its mask at 1, or drop the sample")
        )
    if one.log_probs is not None:
        given = np.zeros(len(one.tokens), np.float32)
        given[offset:] = one.log_probs
        other = np.flatnonzero(sampled & (given[:size] != log_probs))
        if len(other):
            where = int(other[0])
            raise ReturnedWrong(
                f"{on}: log-prob {given[where]} of token {where}; the engine said "
                f"{log_probs[where]}"
            )
    return runs(one, max(size - offset, 0))


def runs(one: Returned, begin: int) -> list[Run]:
    """The response from offset `begin` on, cut where the mask changes."""
    edges = np.flatnonzero(np.diff(one.sampled[begin:])) + 1 + begin
    bounds = [begin, *edges.tolist(), one.response_length]
    response = one.tokens[len(one.tokens) - one.response_length :]
    made = []
    for start, end in pairwise(bounds):
        if start == end:
            continue
        sampled = bool(one.sampled[start])
        log_probs = one.log_probs[start:end] if sampled and one.log_probs is not None else None
        made.append(Run(response[start:end], sampled, log_probs))
    return made


def _recorded(at: Trajectory) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.float32]]:
    """[P + response] Whether each token was sampled, and its log-prob, 0 where it was not."""
    size = len(at.prompt_tokens) + at.response_length
    sampled, log_probs = np.zeros(size, bool), np.zeros(size, np.float32)
    for piece in at.pieces:
        if isinstance(piece, Segment):
            begin = len(at.prompt_tokens) + piece.start
            sampled[begin : begin + len(piece.tokens)] = True
            log_probs[begin : begin + len(piece.tokens)] = piece.log_probs
    return sampled, log_probs
