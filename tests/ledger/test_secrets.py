"""No secret is stored or printed: not in any byte of a ledger, nor in any output or error."""

from __future__ import annotations

import io
import json
import os
import traceback
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from ledger import open_ledger
from ledger.cli import main
from ledger.environment import describe_environment
from ledger.errors import LedgerError
from ledger.redact import redact
from tests.ledger import factory
from tests.ledger.faulty import FaultyStore

PASSWORD = "hunter2Planted"
KEY = "AKIA" + "PLANTEDPLANTED12"
TOKEN = "hf_" + "plantedPlanted" * 3
PLANTED = (PASSWORD, KEY, TOKEN)


def found_in(data: bytes) -> list[str]:
    return [secret for secret in PLANTED if secret.encode() in data]


def everything_below(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file())


def test_settings_places_and_environments_are_stored_without_secrets(
    quick_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", PASSWORD)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("LEDGER_SOMETHING", f"postgresql://u:{PASSWORD}@h/db")
    places = {
        "ledger": f"s3://bucket/run?X-Amz-Signature={PASSWORD}",
        "catalog": f"postgresql+psycopg://user:{PASSWORD}@host/db",
        "storage_options": {"key": KEY, "secret": PASSWORD, "endpoint_url": "http://h"},
        "command": ["ledger-train", "--api-key", PASSWORD, f"--hub-token={TOKEN}"],
    }
    with open_ledger(quick_path / "ledger", create=True) as ledger:
        ledger.create_run(factory.RUN)
        store = FaultyStore(ledger.store)
        ledger.store = store  # type: ignore[assignment]
        started = factory.started().evolve(
            settings=json.dumps(redact({"lr": 1e-6, "wandb_api_key": PASSWORD})),
            places=json.dumps(redact(places)),
            environment=json.dumps(redact(describe_environment())),
        )
        ledger.writer(factory.RUN, producer="p").append([started])
        queue = ledger.queued_writer(
            factory.RUN,
            producer="q",
            policy="spill",
            spill=quick_path / "spill",
            patience_s=0.0,
            max_spill_bytes=1,
            block_timeout_s=0.0,
        )
        store.failures = -1
        with pytest.raises(LedgerError):
            queue.append([factory.score(1, 1.0)]).result(20)
        queue.abandon(f"the server postgresql://u:{PASSWORD}@h/db is gone, token {TOKEN}, {KEY}")
        store.failures = 0
        queue.flush()
        queue.close()
    assert found_in(everything_below(quick_path)) == []
    assert b"lr" in everything_below(quick_path)
    said = io.StringIO()
    with redirect_stdout(said), redirect_stderr(said):
        for command in (
            ["runs"],
            ["log"],
            ["check"],
            ["verify"],
            ["sql", "select settings, places, environment, reason from run_started, gap_recorded"],
        ):
            for more in ([], ["--json"]) if command[0] != "verify" else ([],):
                main([command[0], "--ledger", str(quick_path / "ledger"), *command[1:], *more])
    assert found_in(said.getvalue().encode()) == []
    assert "missing on main" in said.getvalue()
    assert "1 sample_scored of producer 'q'" in said.getvalue()


@pytest.mark.parametrize(
    ("uri", "catalog", "options"),
    [
        ("ledger", f"postgresql+psycopg://user:{PASSWORD}@127.0.0.1:1/db", None),
        ("ledger", f"postgresql+psycopg://user:{PASSWORD}@127.0.0.1:1/db?nonsense=1", None),
        ("ledger", f"mysql://user:{PASSWORD}@127.0.0.1/db", None),
        ("ledger", f"nonsense:{PASSWORD}@127.0.0.1/db", None),
        (f"ftp://user:{PASSWORD}@host/x", None, None),
        (f"s3://user:{PASSWORD}@bucket/x", None, None),
        (
            "s3://bucket/x",
            "sqlite:///nowhere/catalog.sqlite",
            {"key": KEY, "secret": PASSWORD, "endpoint_url": "http://127.0.0.1:1"},
        ),
    ],
)
def test_errors_and_their_tracebacks_hold_no_secret(
    quick_path: Path,
    uri: str,
    catalog: str | None,
    options: dict[str, str] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    where = str(quick_path / uri) if uri == "ledger" else uri
    with pytest.raises(LedgerError) as caught:
        open_ledger(where, create=True, catalog=catalog, storage_options=options)
    error: BaseException | None = caught.value
    while error is not None:
        assert found_in(repr(error).encode()) == []
        error = error.__cause__ or error.__context__
    text = "".join(traceback.format_exception(caught.value, limit=0))
    assert found_in(text.encode()) == []
    if options is None:
        said = io.StringIO()
        with redirect_stdout(said), redirect_stderr(said):
            code = main(["init", where, *(["--catalog", catalog] if catalog is not None else [])])
        assert code != 0
        assert found_in(said.getvalue().encode()) == []
    assert found_in(everything_below(quick_path)) == []
    assert os.environ.get("AWS_SECRET_ACCESS_KEY") is None
