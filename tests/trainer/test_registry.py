"""Custom algorithms: what their own errors are told as."""

from __future__ import annotations

from pathlib import Path

import pytest

from ledger.errors import InvalidArgument
from trainer.algorithms.registry import resolve


def test_an_error_of_a_custom_algorithm_says_where_it_was_raised(tmp_path: Path, monkeypatch):
    module = tmp_path / "own_loss_with_a_bug.py"
    module.write_text(
        "def inner():\n    raise KeyError('oops')\n\n\ndef loss(inputs, settings):\n    inner()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    loss = resolve({}, "own_loss_with_a_bug:loss", setting="--policy-loss")
    with pytest.raises(InvalidArgument) as told:
        loss(None, None)
    assert "--policy-loss own_loss_with_a_bug:loss" in str(told.value)
    assert f"KeyError: 'oops', raised at {module}:2 in inner" in str(told.value)


def test_a_function_called_with_wrong_arguments_has_no_line_of_its_own(tmp_path, monkeypatch):
    (tmp_path / "own_loss_of_one.py").write_text("def loss(inputs):\n    return inputs\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(InvalidArgument, match="takes 1 positional argument") as told:
        resolve({}, "own_loss_of_one:loss", setting="--policy-loss")(None, None)
    assert "raised at" not in str(told.value)
