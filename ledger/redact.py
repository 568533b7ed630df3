"""Takes secrets out of settings, environments, command lines and addresses before they are stored.

A value is taken out when its name says that it is a secret, or when it looks like one by itself.
Everything that decides results stays readable: a number under a name with "token" is no secret
(`eos_token_id`, `max_tokens`), nor is vocabulary (`eos_token`). A secret's place is still visible.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

__all__ = ["REDACTED", "redact", "redact_text"]

REDACTED = "[redacted]"
"""What stands in the place of a secret."""

_SECRET_NAME = re.compile(
    r"secret|passw(or)?d|passphrase|api[-_ ]?key|access[-_ ]?key|private[-_ ]?key|credential"
    r"|authorization|bearer|cookie|session[-_ ]?key|signature|(?<![a-z])auth(?![a-z])",
    re.IGNORECASE,
)
# "token" as a word of its own. tokens, tokenizer, eos_token, pad_token are vocabulary.
_TOKEN_NAME = re.compile(r"(?<![a-z])token(?![a-z])", re.IGNORECASE)
_VOCABULARY_NAME = re.compile(
    r"(bos|eos|pad|unk|sep|cls|mask|stop|begin|end|image|audio|video|special|per|each|first|last"
    r"|next|prev|num|new|by)[-_ ]?token(?![a-z])"
    r"|token[-_ ](id|ids|count|type|level|budget|dispatcher|drop)",
    re.IGNORECASE,
)
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_KNOWN = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{20,}"
    r"|github_pat_[A-Za-z0-9_]{20,}|glpat-[A-Za-z0-9_-]{16,}|(?:AKIA|ASIA)[A-Z0-9]{16}"
    r"|xox[abprs]-[A-Za-z0-9-]{10,}|AIza[A-Za-z0-9_-]{30,}|npm_[A-Za-z0-9]{30,}"
    r"|pypi-[A-Za-z0-9_-]{16,}|eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{4,})"
)
_BEARER = re.compile(r"\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{8,}", re.IGNORECASE)
_URL = re.compile(r"\b[a-z][a-z0-9+.-]*://[^\s\"'<>]+", re.IGNORECASE)
_SIGNED = re.compile(
    r"^(sig|signature|x-(amz|goog|oss|ms)-(signature|credential|security-token)|awsaccesskeyid"
    r"|googleaccessid|key|code)$",
    re.IGNORECASE,
)
_NO_PORT = re.compile(r"^[^\[@]*:(?!\d+$)[^@]+$")
"""host:something, where that is no number of a port."""
_FLAG = re.compile(r"^--?(?P<name>[A-Za-z][\w.-]*)(?P<value>=.*)?$", re.DOTALL)


def redact(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of `mapping` without secrets, at any depth; the given one is left as it is.

    Text under a name that says it is a secret becomes `[redacted]`; so does the value after a flag
    like `--api-key` in a command line; all other text goes through `redact_text`. Sequences become
    lists. Numbers, booleans and None stay.
    """
    return {str(name): _under(str(name), value) for name, value in mapping.items()}


def redact_text(text: str) -> str:
    """`text` without passwords in addresses, signed parameters, and tokens of known services."""
    text = _URL.sub(lambda found: _redact_url(found.group()), text)
    text = _BEARER.sub(lambda found: f"{found.group(1)} {REDACTED}", text)
    return _KNOWN.sub(REDACTED, text)


def _under(name: str, value: Any) -> Any:
    if value is not None and not isinstance(value, bool | int | float) and _says_secret(name):
        return REDACTED
    if isinstance(value, int) and not isinstance(value, bool) and _SECRET_NAME.search(name):
        return REDACTED
    return _anywhere(value)


def _anywhere(value: Any) -> Any:
    if isinstance(value, str):
        return redact_text(value)
    if isinstance(value, Mapping):
        return redact(value)
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return _redact_list(value)
    return value


def _redact_list(values: Sequence[Any]) -> list[Any]:
    """A list, read as a command line where it has flags."""
    made: list[Any] = []
    secret_next = False
    for value in values:
        flag = _FLAG.match(value) if isinstance(value, str) else None
        if secret_next and flag is None:
            made.append(REDACTED)
        elif flag is not None and flag["value"] is not None and _says_secret(flag["name"]):
            made.append(value[: flag.start("value")] + "=" + REDACTED)
        else:
            made.append(_anywhere(value))
        secret_next = flag is not None and flag["value"] is None and _says_secret(flag["name"])
    return made


def _says_secret(name: str) -> bool:
    words = _CAMEL.sub("_", name)
    if _SECRET_NAME.search(words):
        return True
    return bool(_TOKEN_NAME.search(words)) and not _VOCABULARY_NAME.search(words)


def _redact_url(url: str) -> str:
    try:
        parts = urlsplit(url)
        query = parse_qsl(parts.query, keep_blank_values=True)
    except ValueError:
        return REDACTED  # not an address after all, and nobody can say what is in it
    place, path = parts.netloc, parts.path
    if "@" in path and _NO_PORT.search(place):
        # A password with a '/' in it, as secret keys of AWS have.
        place, path = REDACTED + "@" + path.rpartition("@")[2], ""
    elif "@" in place:
        place = REDACTED + "@" + place.rpartition("@")[2]
    changed = [
        (name, REDACTED if _SIGNED.match(name) or _says_secret(name) else value)
        for name, value in query
    ]
    text = parts.query if changed == query else urlencode(changed, safe="[]/:@,")
    return urlunsplit((parts.scheme, place, path, text, parts.fragment))
