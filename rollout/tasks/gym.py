"""Tasks of the library reasoning-gym: procedural, offline, each with its own verifier."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from ledger.errors import InvalidArgument, MissingDependency, explain
from ledger.seeds import derive_seed
from rollout.tasks import Prompt

__all__ = ["COMPACT", "GymSource", "make_dataset"]

COMPACT: dict[str, tuple[Callable[[Mapping[str, Any]], str], dict[str, Any]]] = {
    "spell_backward": (
        lambda metadata: f"rev {metadata['word'].lower()}>",
        {"min_word_len": 3, "max_word_len": 5},
    ),
    "chain_sum": (
        lambda metadata: metadata["expression"].replace(" ", "") + "=",
        {
            "min_terms": 2,
            "max_terms": 2,
            "min_digits": 1,
            "max_digits": 1,
            "allow_negation": False,
        },
    ),
}
"""By data set: a prompt short enough for a character model, and the options that keep it small."""


def make_dataset(dataset: str, *, seed: int, options: Mapping[str, Any]) -> Any:
    """A reasoning-gym data set of 2**20 rows; row r depends on (seed, r) alone.

    Raises:
        MissingDependency: the library is not installed.
        InvalidArgument: it has no such data set, or refuses the options.
    """
    try:
        import reasoning_gym
    except ImportError as error:
        raise MissingDependency(
            explain(
                f"making the task reasoning_gym:{dataset}",
                expected="the package reasoning-gym",
                found=str(error),
                do="pip install reasoning-gym",
            )
        ) from error
    from reasoning_gym.factory import DATASETS

    if dataset not in DATASETS:
        raise InvalidArgument(
            explain(
                "making a reasoning-gym task",
                on=dataset,
                expected=f"one of its {len(DATASETS)} data sets, such as spell_backward",
                found=dataset,
            )
        )
    try:
        return reasoning_gym.create_dataset(dataset, seed=seed, size=2**20, **options)
    except (TypeError, AssertionError, ValueError) as error:
        raise InvalidArgument(
            explain(
                "making a reasoning-gym task",
                on=f"{dataset} with {json.dumps(dict(options), sort_keys=True)}",
                expected="options of this data set",
                found=f"{type(error).__name__}: {error}",
            )
        ) from error


class GymSource:
    """Prompts of one reasoning-gym data set.

    Options are those of the data set, and `format`: 'compact' (a few characters, for tiny models;
    the default where `COMPACT` knows the data set) or 'question' (the library's own text).
    """

    stop_texts: tuple[str, ...] = ()

    def __init__(
        self, dataset: str, *, seed: int, options: Mapping[str, Any] | None = None
    ) -> None:
        """Raises InvalidArgument for an unknown data set, option or format."""
        given = dict(options or {})
        form = given.pop("format", "compact" if dataset in COMPACT else "question")
        if form not in ("compact", "question") or (form == "compact" and dataset not in COMPACT):
            raise InvalidArgument(
                explain(
                    "making a reasoning-gym task",
                    on=f"{dataset}, option format",
                    expected=f"'question', or 'compact' for {', '.join(sorted(COMPACT))}",
                    found=form,
                )
            )
        self._dataset, self._compact = dataset, form == "compact"
        if self._compact:
            given = COMPACT[dataset][1] | given
        # The library adds the row to its seed: neighbouring seeds would share rows, so ours is
        # hashed first. It must stay below 2**32 for the generators some data sets use.
        library_seed = derive_seed("reasoning_gym", seed) % 2**31
        self._rows = make_dataset(dataset, seed=library_seed, options=given)
        self.reward = f"reasoning_gym:{dataset}"
        settings = json.dumps(given | {"format": form, "seed": seed}, sort_keys=True)
        self.name = f"reasoning_gym:{dataset}{settings}"

    def prompt(self, row: int) -> Prompt:
        """The entry of `row`. Metadata carries all that the verifier needs.

        Raises:
            InvalidArgument: the entry cannot be kept as JSON.
        """
        entry = self._rows[row % len(self._rows)]
        answer = str(entry["answer"])
        try:
            metadata = json.loads(json.dumps({"entry": entry}))
        except TypeError as error:
            raise InvalidArgument(
                explain(
                    "taking a prompt",
                    on=f"{self.name}, row {row}",
                    expected="an entry that JSON can hold",
                    found=str(error),
                    do="use another data set, or a source of your own",
                )
            ) from error
        if self._compact:
            text = COMPACT[self._dataset][0](entry["metadata"])
            return Prompt(text=text, label=answer.lower(), metadata=metadata)
        return Prompt(text=entry["question"], label=answer, metadata=metadata)
