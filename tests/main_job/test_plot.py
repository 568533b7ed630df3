"""Pictures that cannot be written are refused with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import replay.cli

Run = tuple[Path, dict[str, Any]]


@pytest.mark.parametrize("name", ["p.txt", "p", "p.", "p.pgf", "p.png.gz", ".png"])
def test_endings_that_cannot_be_written(
    name: str, dense_run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out" / name
    assert replay.cli.main(["plot", "--ledger", str(dense_run[0]), "--output", str(output)]) == 2
    shown = capsys.readouterr().err
    assert f"--output {output}" in shown
    assert ".pdf, " in shown
    assert ".png, " in shown
    assert not output.parent.exists()


@pytest.mark.parametrize("name", ["a-file/p.png", "folder.png", "file.svg"])
def test_places_that_cannot_be_written(
    name: str, dense_run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a-file").write_text("")
    (tmp_path / "folder.png").mkdir()
    output = tmp_path / name
    expected = 0 if name == "file.svg" else 2
    code = replay.cli.main(["plot", "--ledger", str(dense_run[0]), "--output", str(output)])
    assert code == expected
    shown = capsys.readouterr()
    if expected:
        assert f"writing the picture: --output {output}" in shown.err
    else:
        assert output.stat().st_size > 0
