"""Results as Arrow, pandas, polars, torch, rows and text: the same values, the same bits."""

from __future__ import annotations

import sys

import numpy as np
import pyarrow as pa
import pytest

from ledger import Ledger
from ledger.errors import InvalidArgument, MissingDependency
from ledger.result import Result
from ledger.tensors import Ragged
from tests.ledger.factory import SPECIAL

torch = pytest.importorskip("torch")

TOKENS = (
    "SELECT index, reward, tokens, loss_mask, rollout_log_probs, complete "
    "FROM trajectories JOIN rewards USING (index) WHERE index < 4 ORDER BY index"
)


@pytest.fixture(scope="module")
def result(story_ledger: Ledger) -> Result:
    return story_ledger.sql(TOKENS)


def test_every_form_holds_the_same(result: Result) -> None:
    rows = result.rows()
    assert len(result) == len(rows) == 4
    assert result.columns == list(rows[0])
    assert [row["index"] for row in rows] == [0, 1, 2, 3]
    assert result.arrow()["index"].to_pylist() == [0, 1, 2, 3]
    assert result["index"].to_pylist() == [0, 1, 2, 3]
    without_nan = ["index", "reward", "tokens", "loss_mask", "complete"]
    assert pa.table(result).select(without_nan).equals(result.arrow().select(without_nan))
    frame = result.df()
    assert frame["reward"].tolist() == [row["reward"] for row in rows]
    assert frame["tokens"][2].tolist() == rows[2]["tokens"]
    polars_frame = result.pl()
    assert polars_frame["tokens"].to_list() == [row["tokens"] for row in rows]
    tensors = result.torch()
    assert tensors["index"].tolist() == [0, 1, 2, 3]
    assert tensors["reward"].dtype == torch.float64
    assert tensors["complete"].tolist() == [True] * 4


def test_lists_are_packed_with_their_bits(result: Result) -> None:
    tensors = result.torch()
    tokens, log_probs = tensors["tokens"], tensors["rollout_log_probs"]
    assert isinstance(tokens, Ragged)
    assert isinstance(log_probs, Ragged)
    assert (tokens.values.dtype, tokens.offsets.dtype) == (torch.int32, torch.int64)
    assert tokens.offsets.tolist() == [0, 6, 12, 18, 24]
    assert tokens.lengths.tolist() == [6] * 4
    assert tokens.row(0).tolist() == [100, 101, 102, 11, 12, 2]
    assert np.array_equal(log_probs.row(1).numpy().view(np.uint32), SPECIAL.view(np.uint32))
    assert tensors["loss_mask"].values.dtype == torch.uint8
    nested = torch.nested.nested_tensor_from_jagged(tokens.values, tokens.offsets)
    assert nested[0].tolist() == tokens.row(0).tolist()
    # Writing into a result harms nothing: the memory is its own.
    tokens.values[0] = 7
    assert result.torch()["index"].tolist() == [0, 1, 2, 3]


def test_memory_is_shared_where_it_can_be() -> None:
    values = pa.array([1.0, 2.0, 3.0], pa.float32())
    made = Result(pa.table({"a": values})).torch()["a"]
    assert made.data_ptr() == values.buffers()[1].address


def test_lengths_differ_and_rows_are_padded() -> None:
    lists = pa.array([[1, 2], [], None, [3]], pa.list_(pa.int32()))
    made = Result(pa.table({"a": lists}).slice(0)).torch()["a"]
    assert made.offsets.tolist() == [0, 2, 2, 2, 3]
    assert made.padded(-1).tolist() == [[1, 2], [-1, -1], [-1, -1], [3, -1]]
    cut = Result(pa.table({"a": lists}).slice(3)).torch()["a"]
    assert (cut.values.tolist(), cut.offsets.tolist()) == ([3], [0, 1])
    chunked = pa.chunked_array([lists.slice(0, 2), lists.slice(2)])
    assert Result(pa.table({"a": chunked})).torch()["a"].offsets.tolist() == [0, 2, 2, 2, 3]
    empty = Result(pa.table({"a": lists, "b": [1, 2, 3, 4]}).slice(0, 0)).torch()
    assert empty["a"].offsets.tolist() == [0]
    assert empty["a"].padded().shape == (0, 0)
    assert empty["b"].shape == (0,)


def test_null_is_nan_among_floats_and_refused_among_integers(story_ledger: Ledger) -> None:
    observed = story_ledger.sql(
        "SELECT rollout_log_prob FROM tokens WHERE index = 9 ORDER BY position"
    ).torch()["rollout_log_prob"]
    assert observed.isnan().tolist() == [True] * 3 + [False] * 3 + [True] * 2 + [False] * 2
    integers = story_ledger.sql("SELECT response_position FROM tokens WHERE index = 9")
    with pytest.raises(InvalidArgument, match=r"coalesce\(response_position"):
        integers.torch()


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("SELECT 'a' AS x", "string"),
        ("SELECT {'a': 1} AS x", "struct"),
        ("SELECT [[1]] AS x", "list"),
        ("SELECT 'a'::BLOB AS x", "binary"),
        ("SELECT NULL AS x", "null|int32|1 NULL"),
    ],
)
def test_what_torch_has_no_value_for_is_refused(
    story_ledger: Ledger, query: str, found: str
) -> None:
    with pytest.raises(InvalidArgument, match=found) as caught:
        story_ledger.sql(query).torch()
    assert "column 'x'" in str(caught.value)


def test_times_are_integers_in_their_unit(story_ledger: Ledger) -> None:
    times = story_ledger.sql("SELECT recorded_at FROM events ORDER BY seq").torch()["recorded_at"]
    assert times.dtype == torch.int64
    assert bool((times[1:] >= times[:-1]).all())


def test_it_is_shown_as_a_table() -> None:
    text = repr(Result(pa.table({"index": list(range(30)), "word": ["a\x1b[31m"] * 30})))
    lines = text.splitlines()
    assert lines[0].split() == ["index", "word"]
    assert lines[1].split() == ["0", r"a\x1b[31m"]
    assert (len(lines), lines[-1]) == (22, "… 10 more")


@pytest.mark.parametrize("package", ["pandas", "polars", "torch"])
def test_a_missing_package_is_named(
    result: Result, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingDependency, match=f"pip install {package}"):
        getattr(result, package)()
