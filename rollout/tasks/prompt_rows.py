"""What a row of prompt data says: its prompt, label, metadata and tools, checked."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ledger.canonical import canonical_json
from ledger.errors import InvalidArgument, explain
from rollout.tasks.tables import Table, open_table, parse_slice

__all__ = ["METADATA_KEY", "PromptData", "PromptRow", "PromptRows", "content_digest"]

METADATA_KEY = "metadata"
_NAMES = "--input-key, --label-key, --metadata-key and --tool-key"
_SHOWN = 120
"""Characters of a value that a message shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptData:
    """Where prompts lie, and what the fields of a row mean. Names as in slime.

    A field within an object has a dotted name: `reward_model.ground_truth`.
    """

    path: str
    """A file or folder, or `PATH@[start:end]` for some of its rows."""
    input_key: str = "input"
    """The prompt: a text, or a list of chat messages with `role` and `content`."""
    label_key: str | None = None
    """What a verifier compares with; what is no text becomes JSON."""
    metadata_key: str = METADATA_KEY
    """A JSON object for verifiers, environments and custom functions."""
    tool_key: str = "tools"
    """A list of tools for the chat template."""
    apply_chat_template: bool = False
    apply_chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    shuffle: bool = False
    max_prompt_len: int | None = None
    """Prompts of more tokens are left out, and named in `FileSource.too_long`."""


@dataclass(frozen=True, slots=True)
class PromptRow:
    """One row."""

    prompt: str | list[dict[str, Any]]
    label: str | None
    metadata: dict[str, Any] | None
    tools: list[Any] | None


class PromptRows:
    """The rows that `PromptData.path` means, by their number in the table."""

    def __init__(self, data: PromptData) -> None:
        """Open and digest the data.

        Raises:
            NotFound, InvalidArgument: nothing there, no such format, or no row.
        """
        self._data = data
        asked = (data.input_key, data.label_key, data.metadata_key, data.tool_key)
        part = parse_slice(data.path)
        names = [name for name in asked if name is not None]
        names += [name.partition(".")[0] for name in names if "." in name]
        self._table: Table = open_table(part.path, list(dict.fromkeys(names)))
        self.numbers = part.rows(len(self._table))
        self.digest = _digest(self._table, self.numbers)
        if not len(self.numbers):
            raise InvalidArgument(
                explain(
                    "opening prompt data",
                    on=data.path,
                    expected="rows",
                    found=f"none of the {len(self._table)} rows of {part.path}",
                )
            )

    def check(self) -> None:
        """Read every row once, so that a bad one shows before a run begins and not in its middle.

        Raises InvalidArgument for the first row that has not the fields that were named.
        """
        for number in self.numbers:
            self.row(number)

    def row(self, number: int) -> PromptRow:
        """Row `number` of the table.

        Raises:
            InvalidArgument: it has not the fields that were named; file and line are in the text.
            Conflict: the file has changed since it was opened.
        """
        found = _Fields(self._table.row(number))
        chat = self._data.apply_chat_template
        return PromptRow(
            self._prompt(number, found),
            self._label(number, found),
            self._metadata(number, found),
            self._tools(number, found) if chat else None,
        )

    def bad(
        self, number: int, expected: str, found: object, do: str | None = None
    ) -> InvalidArgument:
        """The refusal of a row."""
        return InvalidArgument(
            explain(
                "reading prompt data",
                on=self._table.place(number),
                expected=expected,
                found=f"{found}"[:_SHOWN],
                do=do or f"correct the row or leave it out, or name other fields with {_NAMES}",
            )
        )

    def _prompt(self, number: int, found: Mapping[str, Any]) -> str | list[dict[str, Any]]:
        key, given = self._data.input_key, found.get(self._data.input_key)
        if isinstance(given, list) and given:
            if not self._data.apply_chat_template:
                raise self.bad(
                    number,
                    f"a text in {key!r}",
                    "a list of chat messages",
                    "add --apply-chat-template",
                )
            return [self._message(number, one) for one in given]
        if not given or not isinstance(given, str):
            shown = repr(given) if key in found else _has(found)
            raise self.bad(number, f"a text or chat messages in {key!r} (--input-key)", shown)
        return given

    def _message(self, number: int, one: Any) -> dict[str, Any]:
        # Columns have every field in every row; a template asks whether a field is there.
        given = one.items() if isinstance(one, dict) else ()
        message = {key: value for key, value in given if value is not None}
        if not isinstance(message.get("role"), str) or not isinstance(
            message.get("content", ""), str
        ):
            raise self.bad(
                number,
                f"messages in {self._data.input_key!r} whose role and content are texts",
                repr(one),
            )
        return message

    def _label(self, number: int, found: Mapping[str, Any]) -> str | None:
        key = self._data.label_key
        if key is None:
            return None
        if key not in found:
            raise self.bad(number, f"a label in {key!r} (--label-key)", _has(found))
        label = found[key]
        if label is None or isinstance(label, str):
            return label
        try:
            return canonical_json(label)
        except InvalidArgument as error:
            raise self.bad(number, f"a label in {key!r} that JSON can hold", repr(label)) from error

    def _metadata(self, number: int, found: Mapping[str, Any]) -> dict[str, Any] | None:
        key, given = self._data.metadata_key, found.get(self._data.metadata_key)
        if given is None and (key == METADATA_KEY or key in found):
            return None
        expected = f"an object that JSON can hold in {key!r} (--metadata-key)"
        if key not in found:
            raise self.bad(number, expected, _has(found))
        try:
            read = json.loads(given if isinstance(given, str) else canonical_json(given))
        except ValueError as error:
            raise self.bad(number, expected, repr(given)) from error
        if not isinstance(read, dict):
            raise self.bad(number, expected, repr(given))
        return read

    def _tools(self, number: int, found: Mapping[str, Any]) -> list[Any] | None:
        key, given = self._data.tool_key, found.get(self._data.tool_key)
        try:
            tools = json.loads(given) if isinstance(given, str) else given
        except ValueError:
            tools = given
        if tools is not None and not isinstance(tools, list):
            raise self.bad(number, f"a list of tools in {key!r} (--tool-key)", repr(given))
        return tools or None


class _Fields(Mapping[str, Any]):
    """A row whose fields within objects have dotted names, where no field is named so itself."""

    def __init__(self, row: Mapping[str, Any]) -> None:
        self._row = row

    def __getitem__(self, key: str) -> Any:
        if key in self._row or "." not in key:
            return self._row[key]
        found: Any = self._row
        for name in key.split("."):
            if not isinstance(found, Mapping):
                raise KeyError(key)
            found = found[name]
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._row)

    def __len__(self) -> int:
        return len(self._row)


def content_digest(path: str) -> str:
    """What a recorded run is compared by: blake3 of the data, and which rows of it are meant.

    Raises as `rollout.tasks.tables.open_table`.
    """
    part = parse_slice(path)
    table = open_table(part.path, ())
    return _digest(table, part.rows(len(table)))


def _digest(table: Table, rows: range) -> str:
    part = "" if rows == range(len(table)) else f"@[{rows.start}:{rows.stop}]"
    return table.digest.hex() + part


def _has(found: Mapping[str, Any]) -> str:
    return f"a row with {', '.join(sorted(map(str, found))) or 'nothing'}"
