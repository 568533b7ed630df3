"""Tokens as text: exact bytes of every piece, characters cut across tokens, what is missing."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

from ledger import Ledger
from ledger.cli import main
from ledger.errors import InvalidArgument, MissingDependency, NotFound
from ledger.show import read_trajectory
from ledger.sql import run_query
from ledger.token_text import TokenText, load_token_text, other_tokenizer
from tests.ledger.factory import RUN, MemoryReader, ints, prompt, segment, started, table_of

tokenizers = pytest.importorskip("tokenizers")

TEXT = "naïve 🙂 €5\n<|end|> ok"


def byte_level() -> Any:
    """A token a byte, with some merges: characters of several bytes are cut."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: number for number, char in enumerate(alphabet)}
    vocab["ok"] = len(vocab)
    made = Tokenizer(models.BPE(vocab=vocab, merges=[("o", "k")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken("<|end|>", special=True)])
    return made


def byte_fallback() -> Any:
    """As Llama's: '▁' for a space, <0xNN> for bytes of characters that the vocabulary lacks."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"naive5<|end>ok"]
    vocab = {name: number for number, name in enumerate(dict.fromkeys(names))}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    made.normalizer = normalizers.Replace(" ", "▁")
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return made


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_pieces_are_exact_bytes(make: Any) -> None:
    tokenizer = make()
    ids = tokenizer.encode(TEXT).ids
    found = TokenText(tokenizer)
    pieces = [found.piece(token) for token in ids]
    assert b"".join(piece or b"?" for piece in pieces) == TEXT.encode()
    assert found.run(ids) == TEXT
    assert found.decode(ids) == TEXT
    # No token of the emoji is a character: their text says the bytes.
    at = TEXT.encode().index("🙂".encode())
    cut = [p for p in pieces if p and not p.isascii()]
    assert {len(p) for p in cut} == {1}
    assert at > 0
    texts = [found.text(token) for token in ids]
    assert r"\xf0" in texts
    assert r"\x82" in texts  # of €


def test_special_tokens_and_ids_that_are_none() -> None:
    tokenizer = byte_level()
    found = TokenText(tokenizer)
    end = tokenizer.token_to_id("<|end|>")
    assert found.piece(end) == b"<|end|>"
    assert found.piece(10**6) is None
    assert found.text(10**6) is None
    assert found.piece(-1) is None
    assert found.run([end, 10**6]) == "<|end|>"


def reader_of(tokenizer: Any, text: str, spans: list[tuple[int, int]]) -> MemoryReader:
    ids = tokenizer.encode(text).ids
    events = [started(), prompt(0, 0), segment(0, ints(*ids), rollout_step=0, spans=spans)]
    return MemoryReader(
        {e.KIND: table_of(e.KIND, [("main", n, e)]) for n, e in enumerate(events, start=1)}
    )


def test_in_sql(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    text = "a€ok"
    reader = reader_of(tokenizer, text, [(2, 0), (3, 1)])
    given = load_token_text(tmp_path)
    rows = run_query(
        reader,
        "SELECT text, token_bytes(token) AS bytes FROM tokens WHERE source = 'sampled' "
        "ORDER BY position",
        token_text=given,
    ).to_pylist()
    assert [row["text"] for row in rows] == ["a", r"\xe2", r"\x82", r"\xac", "ok"]
    assert b"".join(row["bytes"] for row in rows) == text.encode()
    (whole,) = run_query(
        reader,
        "SELECT tokens_text(tokens) AS t, tokens_text(NULL) AS n FROM segments",
        token_text=given,
    ).to_pylist()
    assert whole == {"t": text, "n": None}
    # `text` is asked for, or it costs nothing: no piece was looked up for this.
    fresh = load_token_text(tmp_path / "tokenizer.json")
    run_query(reader, "SELECT count(*), max(token) FROM tokens", token_text=fresh)
    assert fresh._known == {}
    # A person reads the character that two versions share with its place marked.
    shown = read_trajectory(reader, 0, given)
    assert shown["pieces"][0]["span_texts"] == ["a�", "��ok"]
    assert [t["text"] for t in shown["tokens"]][-1] == "ok"


@pytest.mark.parametrize(
    "query",
    [
        "SELECT token_text(token) FROM tokens",
        "SELECT token_bytes(1)",
        "SELECT tokens_text(tokens) FROM segments",
    ],
)
def test_without_a_tokenizer_it_says_so(everything: MemoryReader, query: str) -> None:
    with pytest.raises(InvalidArgument, match="--tokenizer PATH"):
        run_query(everything, query)


def test_what_is_no_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotFound, match=r"tokenizer\.json"):
        load_token_text(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InvalidArgument, match="of a model"):
        load_token_text(tmp_path)
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    with pytest.raises(MissingDependency, match="pip install tokenizers"):
        load_token_text(tmp_path)


def test_another_tokenizer_than_the_runs_is_told(
    story_ledger: Ledger, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = byte_level()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.warns(UserWarning, match="is not the file that the run began with"):
        found = story_ledger.sql("SELECT text FROM tokens WHERE index = 0", tokenizer=tmp_path)
    assert len(found) == 6
    given = load_token_text(tmp_path)
    assert other_tokenizer(story_ledger.reader(RUN), given) is not None
    given.digest = story_ledger.reader(RUN).table("run_started")["tokenizer_digest"][0].as_py()
    assert other_tokenizer(story_ledger.reader(RUN), given) is None
    assert other_tokenizer(MemoryReader({}), given) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        where = ["--ledger", str(story_ledger.root), "--tokenizer", str(tmp_path)]
        assert main(["show", "9", *where]) == 0
    printed = capsys.readouterr()
    assert "is not the file" in printed.err
    assert "text" in printed.out
