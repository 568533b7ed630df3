"""The samples of a session, and where among them a request goes on."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from rollout.episode import Episode
from rollout.openai.asked import Asked, IdsAsked, Known, differing
from rollout.openai.reading import Reader
from rollout.openai.recorded import RecordedTurn

__all__ = ["Branch", "Place", "find_place"]


@dataclass(slots=True, eq=False)
class Branch:
    """One sample of the session."""

    episode: Episode
    known: list[Known] = field(default_factory=list)
    """After each answer, in order."""
    ahead: deque[RecordedTurn] = field(default_factory=deque)
    """Turns that are recorded and that the agent, started again, has not asked for yet."""
    busy: bool = False
    open: bytes | None = None
    """The identity of a request whose answer was cut or failed: it may come again."""
    first: int = 0
    """The first segment of the turn that was begun last."""
    context: npt.NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    """[C] What that turn is sampled from."""
    drift: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Where a request goes on."""

    branch: Branch | None
    """None: a sibling is to be begun."""
    prompt: npt.NDArray[np.int32]
    """[C] The whole context."""
    added: npt.NDArray[np.int32]
    """[n] What the branch lacks of it."""
    text: str
    observer: str
    base: Branch
    """The branch it goes on from; the first one where it goes on from none."""
    drift: int = 0


def find_place(branches: Sequence[Branch], asked: Asked, reader: Reader) -> Place:
    """Where a request goes on: what is recorded is matched before it is encoded anew."""
    best: tuple[Branch, Known] | None = None
    for branch in branches:
        for known in reversed(branch.known):
            if asked.continues(known):
                if best is None or known.size > best[1].size:
                    best = branch, known
                break
    drift = 0
    if best is not None and (added := asked.added(best[1])) is not None:
        branch, known = best
        whole = np.concatenate([known.tokens(), added.tokens])
        if not isinstance(asked, IdsAsked):
            drift = differing(whole, asked.tokens())
        if known is branch.known[-1] and _takes(branch, known.size):
            said = asked.observer(known)
            return Place(branch, whole, added.tokens, added.text, said, branch, drift)
        base = branch
    else:
        whole, base = asked.tokens(), branches[0]
    nothing = whole[:0]
    for branch in branches:
        free = not branch.busy and branch.open is None and bool(branch.ahead)
        if free and np.array_equal(branch.ahead[0].context, whole):
            return Place(branch, whole, nothing, "", "user", branch, drift)
    root = branches[0]
    n = len(root.episode.trajectory.prompt_tokens)
    begins = np.array_equal(whole[:n], root.episode.trajectory.prompt_tokens)
    if begins and not root.known and _takes(root, n):
        rest = whole[n:]
        return Place(root, whole, rest, reader.decode(rest), "user", root)
    return Place(None, whole, nothing, "", "user", base, drift)


def _takes(branch: Branch, known: int) -> bool:
    """Whether the branch can go on with something new behind its first `known` ids."""
    if branch.busy or branch.open is not None or branch.ahead:
        return False
    at = branch.episode.trajectory
    return len(at.prompt_tokens) + at.response_length == known
