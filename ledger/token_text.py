"""The text of tokens, by the tokenizer that a run was made with: exact bytes, then characters.

A token is a piece of bytes; a character of several bytes may be cut across tokens. The bytes of a
piece are exact; as text, bytes that are no whole character are written as `\\xNN`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ledger.errors import InvalidArgument, MissingDependency, NotFound, explain
from ledger.hashing import file_hash

if TYPE_CHECKING:
    from ledger.scan import TableSource

__all__ = ["TokenText", "load_token_text", "other_tokenizer"]

_FILE = "tokenizer.json"
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "▁"  # how SentencePiece writes a space


class TokenText:
    """Gives the bytes and the text of token ids. What was asked once is remembered."""

    def __init__(self, tokenizer: Any, digest: bytes | None = None) -> None:
        """`tokenizer` is one of the `tokenizers` package; `digest` the blake3 of its file."""
        self.digest = digest
        self._tokenizer = tokenizer
        described = json.loads(tokenizer.to_str())
        self._decoders = frozenset(_types(described.get("decoder")))
        self._added: dict[int, bytes] = {
            token["id"]: token["content"].encode() for token in described.get("added_tokens", ())
        }
        self._bytes_of = {char: bytes([byte]) for byte, char in _byte_characters().items()}
        self._known: dict[int, bytes | None] = {}

    def piece(self, token: int) -> bytes | None:
        """The bytes of one token; None where the tokenizer has no such id."""
        if token not in self._known:
            self._known[token] = self._find(token)
        return self._known[token]

    def text(self, token: int) -> str | None:
        """One token as text: bytes that are no whole character are written as `\\xNN`."""
        found = self.piece(token)
        return None if found is None else found.decode("utf-8", "backslashreplace")

    def decode(self, tokens: Iterable[int]) -> str:
        """A sequence as text, as the tokenizer decodes it, special tokens included."""
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=False)
        return text

    def run(self, tokens: Iterable[int]) -> str:
        """Pieces one after the other as text; what is no whole character becomes U+FFFD."""
        return b"".join(self.piece(token) or b"" for token in tokens).decode("utf-8", "replace")

    def _find(self, token: int) -> bytes | None:
        if token < 0:
            return None
        if token in self._added:
            return self._added[token]
        piece = self._tokenizer.id_to_token(token)
        if piece is None:
            return None
        piece = str(piece)
        if "ByteLevel" in self._decoders:
            return b"".join(self._bytes_of.get(c, c.encode()) for c in piece)
        byte = _BYTE.fullmatch(piece)
        if byte is not None and "ByteFallback" in self._decoders:
            return bytes([int(byte.group(1), 16)])
        if self._decoders & {"ByteFallback", "Metaspace"}:
            return piece.replace(_SPACE, " ").encode()
        text: str = self._tokenizer.decode([token], skip_special_tokens=False)
        return text.encode()


def load_token_text(path: str | Path) -> TokenText:
    """The tokenizer in a file tokenizer.json, or in a folder that holds one.

    Raises:
        NotFound: there is no such file.
        InvalidArgument: it is not a tokenizer.
        MissingDependency: the package `tokenizers` is not installed.
    """
    place = Path(path)
    file = place / _FILE if place.is_dir() else place
    try:
        data = file.read_bytes()
    except OSError as error:
        raise NotFound(
            explain(
                "a tokenizer was not found",
                on=str(file),
                expected=f"a file {_FILE}, or a folder that holds one",
                found=str(error),
            )
        ) from error
    try:
        import tokenizers
    except ImportError as error:
        raise MissingDependency(
            explain("a tokenizer was not loaded", on=str(file), do="pip install tokenizers")
        ) from error
    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(data)
    except Exception as error:  # the package raises nothing more particular
        raise InvalidArgument(
            explain(
                "a tokenizer was not loaded",
                on=str(file),
                expected=f"the {_FILE} of a model",
                found=str(error),
            )
        ) from error
    return TokenText(tokenizer, file_hash(data))


def other_tokenizer(reader: TableSource, token_text: TokenText) -> str | None:
    """A sentence where the tokenizer is not the file that the run began with; None where it is."""
    known = set(reader.table("run_started", ["tokenizer_digest"])["tokenizer_digest"].to_pylist())
    if not known or token_text.digest is None or token_text.digest in known:
        return None
    return (
        f"this tokenizer (blake3 {token_text.digest.hex()}) is not the file that the run began "
        f"with ({', '.join(sorted(digest.hex() for digest in known))}): texts may be other ones"
    )


def _types(decoder: Any) -> Iterable[str]:
    """Names of a decoder and of those it is made of."""
    if isinstance(decoder, dict):
        yield str(decoder.get("type"))
        for one in decoder.get("decoders", ()):
            yield from _types(one)


def _byte_characters() -> dict[int, str]:
    """How byte-level tokenizers write each byte as a printable character (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {
        byte: chr(256 + n) for n, byte in enumerate(others)
    }
