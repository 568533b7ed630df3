"""No secret reaches the ledger; everything that decides results does."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ledger.environment import FLAGS, describe_environment
from ledger.redact import REDACTED, redact, redact_text


@pytest.mark.parametrize(
    "name",
    [
        "token",
        "HF_TOKEN",
        "hf_token",
        "hfToken",
        "access-token",
        "password",
        "PGPASSWORD",
        "passwd",
        "client_secret",
        "AWS_SECRET_ACCESS_KEY",
        "aws_access_key_id",
        "api_key",
        "api-key",
        "apiKey",
        "OPENAI_API_KEY",
        "credentials",
        "Authorization",
        "private_key",
    ],
)
def test_a_value_under_a_secret_name_is_taken_out(name: str) -> None:
    assert redact({name: "value"}) == {name: REDACTED}
    assert redact({"deep": [{name: "value"}]}) == {"deep": [{name: REDACTED}]}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 100),
        ("max_tokens_per_gpu", 9216),
        ("eos_token_id", 2),
        ("stop_token_ids", [1, 2]),
        ("eos_token", "</s>"),
        ("pad_token", "<pad>"),
        ("tokenizer", "gpt2"),
        ("tokenizer_digest", "ab"),
        ("calculate_per_token_loss", True),
        ("token", None),
        ("author", "somebody"),
        ("secretary", None),
        ("keys", ["a"]),
        ("lr", 1e-6),
        ("path", "/data/hf_models/sk-learn"),
        ("url", "s3://bucket/folder?list-type=2"),
    ],
)
def test_what_decides_results_stays(name: str, value: object) -> None:
    assert redact({name: value}) == {name: value}


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("postgresql+psycopg://user:hunter2@host:5432/db", "hunter2"),
        ("s3://AKIA:wJal/rXUtn@bucket/x", "rXUtn"),
        ("https://user@host/x", "user"),
        ("https://b.s3.amazonaws.com/k?X-Amz-Signature=abc123&X-Amz-Date=1", "abc123"),
        ("https://b.s3.amazonaws.com/k?X-Amz-Credential=cred1&a=1", "cred1"),
        ("https://account.blob.core.windows.net/c?sv=1&sig=s1gn3d", "s1gn3d"),
        ("see https://h/x?access_token=zzz9 there", "zzz9"),
        ("hf_" + "a" * 34, "a" * 34),
        ("sk-proj-" + "b" * 40, "b" * 40),
        ("ghp_" + "c" * 36, "c" * 36),
        ("AKIA" + "D" * 16, "D" * 16),
        ("Authorization: Bearer abcdefghij0123", "abcdefghij0123"),
    ],
)
def test_what_looks_like_a_secret_is_taken_out_of_any_text(text: str, secret: str) -> None:
    assert secret not in redact_text(text)
    assert REDACTED in redact_text(text)
    assert secret not in json.dumps(redact({"note": text, "list": [text], "deep": {"x": text}}))


def test_an_address_keeps_what_is_not_secret() -> None:
    assert redact_text("s3://k:a/b@bucket/x") == f"s3://{REDACTED}@bucket/x"
    assert redact_text("http://host:80/a@2.png") == "http://host:80/a@2.png"
    assert redact_text("postgresql://u:p@host:5432/db") == f"postgresql://{REDACTED}@host:5432/db"


def test_command_lines_lose_the_value_after_a_secret_flag() -> None:
    given_line = ["prog", "--api-key", "k", "--wandb-token=w", "--max-tokens", "5", "--password"]
    assert redact({"argv": given_line})["argv"] == [
        "prog",
        "--api-key",
        REDACTED,
        f"--wandb-token={REDACTED}",
        "--max-tokens",
        "5",
        "--password",
    ]


def test_the_given_mapping_is_left_alone() -> None:
    settings = {"password": "p", "deep": {"token": "t"}}
    redact(settings)
    assert settings == {"password": "p", "deep": {"token": "t"}}


@given(
    st.dictionaries(
        st.text(), st.recursive(st.none() | st.booleans() | st.floats() | st.text(), st.lists)
    )
)
def test_redacting_twice_changes_nothing_more(settings: dict[str, object]) -> None:
    once = redact(settings)
    assert repr(redact(once)) == repr(once)


def test_the_environment_is_json_and_has_only_listed_variables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "do-not-store")
    found = describe_environment()
    assert "do-not-store" not in json.dumps(found)
    assert found["flags"]["OMP_NUM_THREADS"] == "3"
    assert set(found["flags"]) <= set(FLAGS)
    assert {"duckdb", "pyarrow"} <= set(found["packages"])
    assert found["python"].count(".") == 2
