"""Shows one trajectory as a person reads it: turns, text, tokens, masks, log-probs, versions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
from rich.console import Group
from rich.table import Table
from rich.text import Text

from ledger.errors import NotFound, explain
from ledger.output import printable
from ledger.reader import Reader
from ledger.scan import TableSource
from ledger.schema import arrow_schema
from ledger.session import Session, SessionPool, session
from ledger.sql import ask as ask_session
from ledger.sql import run_query

if TYPE_CHECKING:
    from ledger.token_text import TokenText

__all__ = ["draw_trajectory", "read_trajectory"]

_COLOURS = ("cyan", "magenta", "yellow", "green", "blue", "red")


def read_trajectory(
    reader: TableSource, index: int, token_text: TokenText | None = None
) -> dict[str, Any]:
    """Everything about one sample: its row in `samples`, its pieces, tokens, scores and decisions.

    Keys: sample, prompt, siblings, pieces, tokens, scores, decisions, trained (steps in order).
    Siblings are the other samples of its rollout, each with the sample that it began in. The tokens
    carry the trainer's numbers of the last step. With `token_text` each token has a text, and each
    segment the text of its spans of one version. Raises NotFound where no prompt was issued for
    `index`.
    """
    with session(_OneSample(reader, index)) as used:
        found = _read(used, index, reader)
    if token_text is not None:
        for token in found["tokens"]:
            token["text"] = token_text.text(token["token"])
        response = [t["token"] for t in found["tokens"] if t["source"] != "prompt"]
        for piece in found["pieces"]:
            if piece["piece"] == "segment":
                ids = response[piece["start"] : piece["start"] + piece["length"]]
                piece["span_texts"] = [
                    token_text.run(ids[start:end])
                    for start, end in zip(piece["span_starts"], piece["span_ends"], strict=True)
                ]
    return found


class _OneSample:
    """A reader's rows about one sample, where an event is about one: others are not opened."""

    def __init__(self, reader: TableSource, index: int) -> None:
        self._reader = reader
        self._index = index

    @property
    def sessions(self) -> SessionPool | None:
        return getattr(self._reader, "sessions", None)

    def table(self, kind: str, columns: Sequence[str] | None = None) -> pa.Table:
        if "index" not in arrow_schema(kind).names:
            return self._reader.table(kind, columns)
        wanted = None if columns is None else [*columns, *({"index"} - set(columns))]
        if isinstance(self._reader, Reader):
            where = {"index": (self._index, self._index)}
            table = self._reader.table(kind, wanted, where=where)
        else:
            table = self._reader.table(kind, wanted)
        found = table.filter(pc.field("index") == self._index)
        return found if columns is None else found.select(list(columns))


def _read(used: Session, index: int, whole: TableSource) -> dict[str, Any]:
    def ask(sql: str) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = ask_session(used, sql, [index]).to_pylist()
        return rows

    samples = ask("SELECT s.* FROM samples AS s WHERE s.index = $1")
    if not samples:
        known = run_query(
            whole, "SELECT min(s.index) AS low, max(s.index) AS high FROM samples AS s"
        ).to_pylist()[0]
        found = (
            "no samples"
            if known["low"] is None
            else f"samples {known['low']} to {known['high']}, not this one"
        )
        raise NotFound(
            explain(
                "showing a trajectory",
                on=f"sample {index}",
                expected="the index of a sample that was issued",
                found=found,
                do='find one: ledger sql "SELECT index, reward FROM samples"',
            )
        )
    sample = samples[0]
    return {
        "sample": sample,
        "prompt": ask(
            "SELECT p.text, p.tokens, p.label, p.source, p.source_row FROM prompts AS p "
            "WHERE list_contains(p.indices, $1)"
        )[0],
        "siblings": ask(
            "SELECT p.index, p.parent_index, p.tokens AS prompt_length FROM (\n"
            "  SELECT unnest(i.indices) AS index, unnest(i.rollout_ids) AS rollout_id,\n"
            "         i.parent_index, len(i.tokens) AS tokens FROM prompt_issued AS i) AS p\n"
            "JOIN (SELECT s.rollout_id FROM samples AS s WHERE s.index = $1) AS o\n"
            "  ON p.rollout_id = o.rollout_id\n"
            "WHERE p.index <> $1 ORDER BY p.index"
        ),
        "pieces": ask(
            "SELECT 'segment' AS piece, s.segment, s.turn, s.start, s.length,\n"
            "       'sampled' AS source, NULL AS text, s.span_starts, s.span_ends,\n"
            "       s.span_versions, s.finish_reason, s.temperature, s.top_p, s.top_k,\n"
            "       s.sampling_seed, s.logprob_mode, s.engine\n"
            "FROM segments AS s WHERE s.index = $1\n"
            "UNION ALL BY NAME\n"
            "SELECT 'observation' AS piece, o.turn, o.start, len(o.tokens) AS length, o.source,\n"
            "       o.text FROM observation_appended AS o WHERE o.index = $1\n"
            "ORDER BY start"
        ),
        "tokens": ask(
            "SELECT t.position, t.token, t.source, t.turn, t.loss_mask, t.rollout_log_prob,\n"
            "       t.log_prob, t.weight_version, t.advantage\n"
            "FROM tokens AS t WHERE t.index = $1 ORDER BY t.position"
        ),
        "signals": ask(
            "SELECT s.branch, s.step FROM signal_recorded AS s WHERE s.index = $1 ORDER BY s.seq"
        ),
        "scores": ask(
            "SELECT s.raw_reward, s.reward, s.part_names, s.part_values, s.verifier,\n"
            "       s.verifier_version, s.response_text, s.branch, s.seq\n"
            "FROM sample_scored AS s WHERE s.index = $1 ORDER BY s.seq"
        ),
        "decisions": ask(
            "SELECT d.decision, d.reason, d.rule, d.branch, d.seq\n"
            "FROM decisions AS d WHERE d.index = $1 ORDER BY d.seq"
        ),
        "trained": ask(
            "SELECT c.branch, c.step, c.position, c.micro_batch, c.weight_version_in,\n"
            "       c.weight_version_out\n"
            "FROM consumption AS c WHERE c.index = $1 ORDER BY c.weight_version_out"
        ),
    }


def draw_trajectory(found: dict[str, Any]) -> Group:
    """What `read_trajectory` found, to print with rich. Each weight version has its colour."""
    sample = found["sample"]
    head = Text(f"sample {sample['index']}", style="bold")
    head.append(
        f"  rollout {sample['rollout_id']}  group {sample['group_index']}"
        f"  rollout step {sample['rollout_step']}  run {sample['run_id']}"
        f"  branch {sample['branch']}",
        style="not bold",
    )
    parts: list[Any] = [head, *_kin(found), *_fates(found), Text()]
    parts += [Text("prompt", style="bold"), _indented(found["prompt"]["text"])]
    turn, before = None, None
    for piece in found["pieces"]:
        if piece["turn"] != turn:
            turn = piece["turn"]
            parts.append(Text(f"turn {turn}", style="bold"))
        parts.append(_piece_line(piece, before))
        if piece["piece"] == "segment":
            before = piece
        if piece["text"] is not None:
            parts.append(_indented(piece["text"], "    "))
        if "span_texts" in piece:
            parts.append(_spans(piece))
    text = next((s["response_text"] for s in reversed(found["scores"]) if s["response_text"]), None)
    if text is not None:
        parts.extend([Text("response, as it was judged", style="bold"), _indented(text)])
    if found["tokens"]:
        # Without a signal the view has 0: "no step used it", which is not known then.
        unknown = bool(found["trained"]) and not found["signals"]
        parts.extend([Text(), _token_table(found["tokens"], masks=not unknown)])
    return Group(*parts)


def _fates(found: dict[str, Any]) -> list[Text]:
    """Scores, decisions and steps, one line each, in order; the last score counts."""
    lines = []
    for score in found["scores"]:
        named = zip(score["part_names"], score["part_values"], strict=True)
        parts = ", ".join(f"{name} {value:g}" for name, value in named)
        lines.append(
            Text(
                f"  reward {score['reward']:g} (raw {score['raw_reward']:g}"
                + (f"; {parts}" if parts else "")
                + f") by {score['verifier']} {score['verifier_version']}"
            )
        )
    for decision in found["decisions"]:
        because = f": {decision['reason']}" if decision["reason"] else ""
        lines.append(Text(f"  {decision['decision']}{because} (by {decision['rule']})"))
    for step in found["trained"]:
        lines.append(
            Text(
                f"  trained in step {step['step']} of {step['branch']}, micro-batch "
                f"{step['micro_batch']}: version {step['weight_version_in']} → "
                f"{step['weight_version_out']}"
                + ("" if _has_signal(found, step) else "; what it used is no longer kept")
            )
        )
    return lines


def _has_signal(found: dict[str, Any], step: dict[str, Any]) -> bool:
    """Whether the masks, log-probs and advantages that a step had are there."""
    return {"branch": step["branch"], "step": step["step"]} in found["signals"]


_PARAMETERS = ("temperature", "top_p", "top_k", "logprob_mode", "engine")


def _kin(found: dict[str, Any]) -> list[Text]:
    """The other samples of the rollout, where there are any."""
    parent = found["sample"]["parent_index"]
    lines = [] if parent is None else [Text(f"  began in the episode of sample {parent}")]
    kin = [
        f"{one['index']}"
        + ("" if one["parent_index"] is None else f" (began in {one['parent_index']})")
        for one in found["siblings"]
    ]
    if kin:
        lines.append(Text(f"  the same rollout, one reward: samples {', '.join(kin)}"))
    return lines


def _piece_line(piece: dict[str, Any], before: dict[str, Any] | None) -> Text:
    """One piece; sampling parameters only where they are not those of the segment `before`."""
    end = piece["start"] + piece["length"]
    where = f", {piece['length']} tokens at {piece['start']} to {end}"
    if piece["piece"] == "observation":
        return Text(f"  {piece['source']}{where}")
    line = Text(f"  sampled{where}")
    for start, end, version in zip(
        piece["span_starts"], piece["span_ends"], piece["span_versions"], strict=True
    ):
        line.append("  ")
        known = version if version >= 0 else None
        label = "unknown version" if known is None else f"version {version}"
        line.append(f"[{start}:{end}] {label}", style=_version_style(known))
    line.append(f"  {piece['finish_reason']}  seed {piece['sampling_seed']}", style="dim")
    if before is None or any(piece[name] != before[name] for name in _PARAMETERS):
        line.append(
            f"  temperature {piece['temperature']:g}  top_p {piece['top_p']:g}  top_k "
            f"{piece['top_k']}  log-probs {piece['logprob_mode']}  {piece['engine']}",
            style="dim",
        )
    return line


def _spans(piece: dict[str, Any]) -> Text:
    """The text of a segment, each version in its colour."""
    made = Text("    ")
    for text, version in zip(piece["span_texts"], piece["span_versions"], strict=True):
        lines = "\n    ".join(printable(line) for line in text.split("\n"))
        made.append(lines, style=_version_style(version if version >= 0 else None))
    return made


def _token_table(tokens: list[dict[str, Any]], *, masks: bool) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("position", "token", "mask", "version", "rollout lp", "trainer lp", "difference"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("advantage", justify="right", no_wrap=True)
    table.add_column("source", no_wrap=True)
    with_text = any("text" in token for token in tokens)
    if with_text:
        table.add_column("text", no_wrap=True)
    for token in tokens:
        rollout, trainer = token["rollout_log_prob"], token["log_prob"]
        both = rollout is not None and trainer is not None
        version = token["weight_version"]
        table.add_row(
            str(token["position"]),
            str(token["token"]),
            str(token["loss_mask"]) if masks else "",
            "" if version is None else str(version),
            _number(rollout),
            _number(trainer),
            f"{trainer - rollout:+.2e}" if both else "",
            _number(token["advantage"]),
            printable(token["source"]),
            *([Text(_quoted(token["text"]))] if with_text else []),
            style=_version_style(version) if token["source"] == "sampled" else "dim",
        )
    return table


def _version_style(version: int | None) -> str:
    return "" if version is None else _COLOURS[version % len(_COLOURS)]


def _quoted(text: str | None) -> str:
    """A piece with its spaces to be seen; nothing for an id that the tokenizer does not have."""
    return "" if text is None else f"'{printable(text)}'"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6f}"


def _indented(text: str, by: str = "  ") -> Text:
    # A model's text may hold anything: control characters must not reach the terminal.
    lines = [by + printable(line) for line in text.splitlines()]
    return Text("\n".join(lines) or by + "(empty)")
