"""Prompt data from files: a row is the same prompt in every format, and a bad one is named."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from blake3 import blake3

from ledger.chat_template import chat_template_digest
from ledger.errors import Conflict, InvalidArgument, NotFound
from rollout.tasks import columns, tables
from rollout.tasks.files import FileSource
from rollout.tasks.prompt_rows import PromptData, PromptRows, content_digest
from rollout.tasks.shuffle import Shuffle

Row = dict[str, Any]
ROWS: list[Row] = [
    {"input": f"{i}+1=", "label": str(i + 1), "metadata": {"i": i, "deep": {"x": [i, None]}}}
    for i in range(23)
]
CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if tools %}[{{ tools|length }}]{% endif %}"
    "{% if add_generation_prompt %}<a{{ mood or '' }}>{% endif %}"
)


def jsonl(path: Path, rows: Iterable[Row]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def parquet(path: Path, rows: Sequence[Row], row_group_size: int = 5) -> Path:
    pq.write_table(pa.Table.from_pylist(list(rows)), path, row_group_size=row_group_size)
    return path


def saved(folder: Path, rows: Sequence[Row]) -> Path:
    """As `datasets.Dataset.save_to_disk` (5.2.0) writes two shards."""
    folder.mkdir()
    names = [f"data-0000{i}-of-00002.arrow" for i in range(2)]
    for name, part in zip(names, (rows[:9], rows[9:]), strict=True):
        table = pa.Table.from_pylist(list(part))
        with pa.ipc.new_stream(folder / name, table.schema) as stream:
            for begin in range(0, len(part), 4):
                stream.write_table(table.slice(begin, 4))
    state = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "0"}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def folder_of(make: Callable[..., Path], suffix: str) -> Callable[[Path, Sequence[Row]], Path]:
    def made(folder: Path, rows: Sequence[Row]) -> Path:
        folder.mkdir()
        make(folder / f"b{suffix}", rows[9:])
        make(folder / f"a{suffix}", rows[:9])
        (folder / "README.md").write_text("not data")
        return folder

    return made


FORMS: dict[str, Callable[[Path, Sequence[Row]], Path]] = {
    "rows.jsonl": jsonl,
    "rows.parquet": parquet,
    "saved": saved,
    "jsonl files": folder_of(jsonl, ".jsonl"),
    "parquet files": folder_of(parquet, ".parquet"),
}


def source(path: Path | str, tokenizer: Any = None, **options: Any) -> FileSource:
    data = PromptData(path=str(path), **{"label_key": "label", **options})
    return FileSource(data, tokenizer=tokenizer, seed=11, reward="exact_line")


@pytest.mark.parametrize("form", FORMS)
def test_every_format_gives_the_same_prompts(form: str, tmp_path: Path) -> None:
    made = source(FORMS[form](tmp_path / form, ROWS))
    assert len(made) == len(ROWS)
    for row in reversed(range(2 * len(ROWS))):
        prompt, expected = made.prompt(row), ROWS[row % len(ROWS)]
        assert (prompt.text, prompt.label) == (expected["input"], expected["label"])
        assert prompt.metadata == expected["metadata"]


@pytest.mark.parametrize("form", [jsonl, parquet, saved], ids=lambda form: form.__name__)
def test_a_field_within_an_object_has_a_dotted_name(form: Any, tmp_path: Path) -> None:
    rows = [
        {
            "prompt": f"{i}+1=",
            "reward_model": {"style": "rule", "ground_truth": str(i + 1)},
            "extra": {"deep": {"split": "train"}},
        }
        for i in range(23)
    ]
    data = PromptData(
        path=str(form(tmp_path / f"rows.{form.__name__}", rows)),
        input_key="prompt",
        label_key="reward_model.ground_truth",
        metadata_key="extra.deep",
    )
    found = PromptRows(data).row(7)
    assert (found.prompt, found.label, found.metadata) == ("7+1=", "8", {"split": "train"})
    for missing in ("reward_model.label", "prompt.label", "labels.ground_truth"):
        with pytest.raises(InvalidArgument, match=f"a label in '{missing}'"):
            PromptRows(replace(data, label_key=missing)).check()


def test_a_field_that_has_a_dot_in_its_own_name_comes_first(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "x.jsonl", [{"input": "a", "b.c": "own", "b": {"c": "within"}}])
    assert PromptRows(PromptData(path=str(path), label_key="b.c")).row(0).label == "own"


def test_a_real_saved_data_set(tmp_path: Path) -> None:
    import datasets

    datasets.disable_progress_bars()
    rows = datasets.Dataset.from_list(ROWS).select([4, 0, 22])
    rows.save_to_disk(tmp_path / "one")
    assert [source(tmp_path / "one").prompt(row).label for row in range(3)] == ["5", "1", "23"]
    datasets.DatasetDict({"train": rows}).save_to_disk(tmp_path / "dict")
    assert source(tmp_path / "dict/train").prompt(2).text == "22+1="
    with pytest.raises(InvalidArgument, match=r"dictionary of the splits train[^~]*dict/train"):
        source(tmp_path / "dict")


@pytest.mark.parametrize(
    ("part", "expected"),
    [("@[2:5]", range(2, 5)), ("@[:-20]", range(3)), ("@[20:]", range(20, 23)), ("", range(23))],
)
def test_a_part_of_the_rows(part: str, expected: range, tmp_path: Path) -> None:
    path = jsonl(tmp_path / "rows.jsonl", ROWS)
    made = source(f"{path}{part}")
    assert [made.prompt(row).text for row in range(len(made))] == [
        ROWS[i]["input"] for i in expected
    ]
    assert content_digest(f"{path}{part}") == made.digest
    whole = blake3(path.read_bytes()).hexdigest()
    assert made.digest == (
        whole if len(expected) == 23 else f"{whole}@[{expected.start}:{expected.stop}]"
    )
    with pytest.raises(InvalidArgument, match="none of the 23 rows"):
        source(f"{path}@[23:]")


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 301])
def test_a_shuffle_is_a_permutation(size: int) -> None:
    orders = [tuple(Shuffle(size, seed)[i] for i in range(size)) for seed in range(3)]
    for order in orders:
        assert sorted(order) == list(range(size))
    assert len(set(orders)) > 1 or size < 4


def test_the_orders_of_a_shuffle_are_about_equally_frequent() -> None:
    counts = Counter(tuple(Shuffle(3, seed)[i] for i in range(3)) for seed in range(1200))
    assert len(counts) == 6
    # 200 each; six standard deviations of a binomial count are 77.
    assert all(abs(count - 200) < 77 for count in counts.values())


def test_a_shuffle_is_pinned() -> None:
    """A change here changes the prompts of every recorded run: it must be meant."""
    assert [Shuffle(10, 3)[i] for i in range(10)] == [0, 2, 7, 8, 9, 1, 6, 4, 3, 5]
    with pytest.raises(IndexError):
        Shuffle(10, 3)[10]


def test_each_epoch_has_every_row_once_in_an_order_of_its_own(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "rows.jsonl", ROWS)
    made, again = source(path, shuffle=True), source(path, shuffle=True)
    epochs = [[made.prompt(23 * e + i).text for i in range(23)] for e in range(3)]
    assert all(sorted(epoch) == sorted(row["input"] for row in ROWS) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert [again.prompt(row).text for row in reversed(range(69))] == [
        text for epoch in epochs for text in epoch
    ][::-1]
    data = PromptData(path=str(path), label_key="label", shuffle=True)
    other = FileSource(data, tokenizer=None, seed=12, reward="exact_line")
    assert [other.prompt(row).text for row in range(23)] != epochs[0]
    assert other.name != made.name == again.name


def test_the_name_is_of_the_content_and_not_of_the_place(tmp_path: Path) -> None:
    one, two = jsonl(tmp_path / "a.jsonl", ROWS), jsonl(tmp_path / "b.jsonl", ROWS)
    assert source(one).name == source(two).name
    assert source(one).name != source(jsonl(tmp_path / "c.jsonl", ROWS[::-1])).name
    assert source(one).name != source(one, label_key=None).name


def test_lines_of_nothing_are_no_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.jsonl"
    text = '\n{"input": "a"}\r\n\r\n\n{"input": "b"}\n{"input": "c"}'
    path.write_bytes(text.encode())
    for chunk in (1, 2, 3, 5, 1 << 20):
        monkeypatch.setattr(tables, "CHUNK_BYTES", chunk)
        os.utime(path, ns=(chunk, chunk))  # another state of the file, so that it is read again
        made = source(path, label_key=None)
        assert [made.prompt(row).text for row in range(len(made))] == ["a", "b", "c"]
    path.write_bytes(text.encode() + b"\nno json")
    with pytest.raises(InvalidArgument, match=r"rows.jsonl, line 7\n"):
        PromptRows(PromptData(path=str(path))).check()


@pytest.mark.parametrize(
    ("line", "options", "message"),
    [
        ('{"input": "a", "label": "b"', {}, "a JSON object"),
        ('["a"]', {}, "a list"),
        (
            '{"prompt": "a", "label": "b"}',
            {},
            "'input' (--input-key)\n  found:    a row with label",
        ),
        ('{"input": "", "label": "b"}', {}, "'input' (--input-key)\n  found:    ''"),
        ('{"input": 3, "label": "b"}', {}, "found:    3"),
        ('{"input": [{"role": "user"}], "label": "b"}', {}, "add --apply-chat-template"),
        ('{"input": "a"}', {}, "a label in 'label' (--label-key)"),
        ('{"input": "a", "label": "b", "metadata": [1]}', {}, "'metadata' (--metadata-key)"),
        ('{"input": "a", "label": "b", "metadata": "{"}', {}, "'metadata' (--metadata-key)"),
        ('{"input": "a", "label": "b", "metadata": {"x": NaN}}', {}, "that JSON can hold"),
        ('{"input": "a", "label": "b"}', {"metadata_key": "extra"}, "'extra' (--metadata-key)"),
        (
            '{"input": [{"content": "a"}], "label": "b"}',
            {"apply_chat_template": True},
            "whose role and content are texts",
        ),
        (
            '{"input": [{"role": "user", "content": [{"type": "image"}]}], "label": "b"}',
            {"apply_chat_template": True},
            "whose role and content are texts",
        ),
        (
            '{"input": "a", "label": "b", "tools": "search"}',
            {"apply_chat_template": True},
            "a list of tools in 'tools' (--tool-key)",
        ),
    ],
)
def test_a_bad_row_is_named_with_its_line(
    line: str, options: Any, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    good = '{"input": "a", "label": "b", "extra": {}}\n'
    path.write_text(good * 2 + line + "\n" + good)
    rows = PromptRows(PromptData(path=str(path), label_key="label", **options))
    with pytest.raises(InvalidArgument) as caught:
        rows.check()
    assert f"reading prompt data: {path}, line 3\n" in str(caught.value)
    assert message in str(caught.value)


@pytest.mark.parametrize("form", ["rows.parquet", "saved", "parquet files"])
def test_a_bad_row_of_columns_is_named_with_its_file(form: str, tmp_path: Path) -> None:
    rows = [*ROWS[:20], {**ROWS[20], "input": None}, *ROWS[21:]]
    made = source(FORMS[form](tmp_path / form, rows))
    file, row = {
        "rows.parquet": (".parquet", 20),
        "saved": ("data-00001-of-00002.arrow", 11),
        "parquet files": ("b.parquet", 11),
    }[form]
    with pytest.raises(InvalidArgument, match=rf"{file}, row {row}\n"):
        made.prompt(20)


@pytest.mark.parametrize("form", ["rows.jsonl", "rows.parquet", "saved"])
def test_data_that_changes_under_a_run_is_noticed(form: str, tmp_path: Path) -> None:
    path = FORMS[form](tmp_path / form, ROWS)
    made = source(path)
    assert made.prompt(22).label == "23"
    file = path if path.is_file() else path / "data-00001-of-00002.arrow"
    before = tables.file_digest(tables.FileState.of(file))
    with file.open("ab") as more:
        more.write(b"\n")
    with pytest.raises(Conflict, match=r"as it was when it was opened[^~]*--from-version K"):
        made.prompt(22)
    assert tables.file_digest(tables.FileState.of(file)) != before


def test_parquet_keeps_few_row_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = columns.ParquetTable(parquet(tmp_path / "rows.parquet", ROWS), ("input",))
    read: list[int] = []
    decode = made._file.read_row_group

    def counted(at: int, **options: Any) -> pa.Table:
        read.append(at)
        return decode(at, **options)

    monkeypatch.setattr(made, "_file", SimpleNamespace(read_row_group=counted))
    assert [made.row(n)["input"] for n in range(23)] == [row["input"] for row in ROWS]
    assert made.row(0) == {"input": "0+1="}
    assert read == [0, 1, 2, 3, 4]
    monkeypatch.setattr(columns, "CACHE_BYTES", 1)
    made.row(22)
    made.row(21)
    assert read == [0, 1, 2, 3, 4]
    made.row(0)
    assert read[-1] == 0
    assert len(made._groups) == 1


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.csv", b"a,b\n", "a .jsonl or .parquet file"),
        ("rows.jsonl", b"\n\n", "rows"),
        ("rows.parquet", b"PAR1 nothing", "a Parquet file"),
    ],
)
def test_other_files_are_refused(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InvalidArgument, match=message) as caught:
        source(tmp_path / name)
    assert name in str(caught.value)


def test_other_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="nothing there"):
        source(tmp_path / "nothing")
    with pytest.raises(InvalidArgument, match="0 of these kinds"):
        source(tmp_path)
    jsonl(tmp_path / "a.jsonl", ROWS)
    parquet(tmp_path / "b.parquet", ROWS)
    with pytest.raises(InvalidArgument, match="2 of these kinds"):
        source(tmp_path)
    (tmp_path / "state.json").write_text('{"_data_files": [{"name": "x"}]}')
    with pytest.raises(InvalidArgument, match="_data_files"):
        source(tmp_path)
    (tmp_path / "state.json").write_text('{"_data_files": [{"filename": "gone.arrow"}]}')
    with pytest.raises(NotFound, match=r"gone\.arrow"):
        source(tmp_path)


@pytest.fixture
def chat(tokenizer: Any) -> Any:
    tokenizer.chat_template = CHAT
    yield tokenizer
    tokenizer.chat_template = None


def test_the_chat_template(chat: Any, tmp_path: Path) -> None:
    turns = [{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}]
    rows = [
        {"input": "hi", "label": 7},
        {"input": turns, "label": {"b": 1.5, "a": [True]}, "tools": [{"name": "f"}, {"name": "g"}]},
        {"input": turns, "label": None, "tools": '[{"name": "f"}]'},
    ]
    path = jsonl(tmp_path / "rows.jsonl", rows)
    made = source(path, chat, apply_chat_template=True)
    assert [made.prompt(row).text for row in range(3)] == [
        "<user>hi<a>",
        "<system>be<user>hi[2]<a>",
        "<system>be<user>hi[1]<a>",
    ]
    assert [made.prompt(row).label for row in range(3)] == ["7", '{"a":[true],"b":1.5}', None]
    sad = source(path, chat, apply_chat_template=True, apply_chat_template_kwargs={"mood": ":"})
    assert sad.prompt(0).text == "<user>hi<a:>"
    assert sad.name != made.name
    chat.chat_template = CHAT + "."
    assert source(path, chat, apply_chat_template=True).name != made.name
    chat.chat_template = "{{ raise_exception('no system') }}"
    with pytest.raises(InvalidArgument, match=r"rows.jsonl, line 1\n[^~]*no system"):
        source(path, chat, apply_chat_template=True)
    chat.chat_template = None
    with pytest.raises(InvalidArgument, match=r"chat_template\.jinja"):
        source(path, chat, apply_chat_template=True)


def test_messages_in_columns_have_no_empty_fields(chat: Any, tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "hi"}, {"role": "tool", "content": "1", "name": "f"}]
    chat.chat_template = "{% for m in messages %}{{ m.keys()|sort|join(',') }};{% endfor %}"
    path = parquet(tmp_path / "rows.parquet", [{"input": turns}])
    made = source(path, chat, apply_chat_template=True, label_key=None)
    assert made.prompt(0).text == "content,role;content,name,role;"


def test_long_prompts_are_left_out_and_named(tokenizer: Any, tmp_path: Path) -> None:
    rows = [{"input": "x" * n, "label": "1"} for n in (3, 9, 4, 12, 5)]
    path = jsonl(tmp_path / "rows.jsonl", rows)
    made = source(path, tokenizer, max_prompt_len=5)
    assert made.too_long == ((1, 9), (3, 12))
    assert [len(made.prompt(row).text) for row in range(4)] == [3, 4, 5, 3]
    assert '"max_prompt_len":5,"too_long":2}' in made.name
    with pytest.raises(InvalidArgument, match="5 rows, the shortest of 3 tokens"):
        source(path, tokenizer, max_prompt_len=2)


def test_the_digest_of_a_chat_template_wherever_it_is_kept(chat: Any, tmp_path: Path) -> None:
    expected = blake3(CHAT.encode()).digest()
    chat.save_pretrained(tmp_path)
    assert chat_template_digest(tmp_path) == expected
    config = tmp_path / "tokenizer_config.json"
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": CHAT}]
    for kept in (CHAT, named):
        config.write_text(json.dumps({"chat_template": kept}))
        assert chat_template_digest(tmp_path) == expected
    config.write_text("{}")
    assert chat_template_digest(tmp_path) is None
