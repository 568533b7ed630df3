"""Megatron's own settings under their own names, derived from its configuration classes.

A field of TransformerConfig, OptimizerConfig or DistributedDataParallelConfig is an option of the
command line: what is new in another version of Megatron is one too, without a line of code. The
classes are read as text, because importing Megatron costs seconds.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ledger.errors import InvalidArgument, explain
from trainer.megatron_fixed import BY_THE_MODEL, FIXED, ON_GPU_ONLY

__all__ = ["Field", "check_on_device", "megatron_fields", "parse_annotation", "passed_on"]

_CLASSES = (
    ("transformer/transformer_config.py", "TransformerConfig"),
    ("model_parallel_config.py", "ModelParallelConfig"),
    ("optimizer/optimizer_config.py", "OptimizerConfig"),
    ("distributed/distributed_data_parallel_config.py", "DistributedDataParallelConfig"),
)
"""Where in megatron/core they are, bases after what is built on them."""


@dataclass(frozen=True, slots=True)
class Field:
    """One field of Megatron's configuration classes."""

    name: str
    owner: str
    """The class that has it."""
    kind: str | None
    """'bool', 'int', 'float', 'str'; with an 's' where a list is taken, with a '+' where one value
    or a list is; None where a command line cannot say it."""
    choices: tuple[str, ...] | None
    default: str
    """As Megatron's source writes it."""
    help: str
    """The first sentence of its docstring."""
    refusal: str | None
    """Why it is no option here; None: it is one."""


@lru_cache(maxsize=1)
def megatron_fields() -> tuple[Field, ...]:
    """Every field, sorted by name; none where Megatron-Core is not installed."""
    spec = find_spec("megatron.core") if find_spec("megatron") else None
    if spec is None or spec.origin is None:
        return ()
    folder = Path(spec.origin).parent
    found: dict[str, Field] = {}
    for path, name in _CLASSES:
        for field in _fields_of(folder / path, name):
            found.setdefault(field.name, field)
    return tuple(found[name] for name in sorted(found))


def _fields_of(path: Path, class_name: str) -> Iterator[Field]:
    tree = ast.parse(path.read_text("utf-8"))
    for node in tree.body:
        if not isinstance(node, ast.ClassDef) or node.name != class_name:
            continue
        for here, after in zip(node.body, [*node.body[1:], None], strict=True):
            if not isinstance(here, ast.AnnAssign) or not isinstance(here.target, ast.Name):
                continue
            text = ""
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                text = str(after.value.value)
            yield _field(class_name, here.target.id, here.annotation, here.value, text)


def _field(
    owner: str, name: str, annotation: ast.expr, default: ast.expr | None, text: str
) -> Field:
    kind, choices = parse_annotation(ast.unparse(annotation))
    refusal = FIXED.get(name)
    if refusal is None and name in BY_THE_MODEL:
        refusal = "the model's config.json says it"
    if refusal is None and kind is None:
        refusal = f"a command line cannot say a {ast.unparse(annotation)}"
    sentence = " ".join(text.split()).split(". ")[0].rstrip(".")
    if len(sentence) > 160:
        sentence = sentence[:157] + "…"
    shown = "none" if default is None else ast.unparse(default)
    return Field(name, owner, kind, choices, shown, sentence, refusal)


_PLAIN = ("bool", "int", "float", "str")


def parse_annotation(text: str) -> tuple[str | None, tuple[str, ...] | None]:
    """What a command line takes for a field of this type: its kind, and what it may be.

    Of several possibilities in a union the most general is taken. (None, None) where none can be
    written on a command line.
    """
    return _parse(ast.parse(text, mode="eval").body)


def _parse(node: ast.expr) -> tuple[str | None, tuple[str, ...] | None]:
    if isinstance(node, ast.Name) and node.id in _PLAIN:
        return node.id, None
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _union([node.left, node.right])
    if not isinstance(node, ast.Subscript):
        return None, None
    outer = ast.unparse(node.value).rsplit(".", 1)[-1]
    inside = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    if outer == "Optional":
        return _parse(inside[0])
    if outer == "Union":
        return _union(inside)
    if outer == "Literal" and all(isinstance(one, ast.Constant) for one in inside):
        values = [one.value for one in inside if isinstance(one, ast.Constant)]
        texts = tuple(value for value in values if isinstance(value, str))
        return ("str", texts) if texts else (None, None)
    if outer in ("List", "list", "Tuple", "tuple", "Sequence"):
        kind = _parse(inside[0])[0]
        return (f"{kind}s", None) if kind in ("int", "float", "str") else (None, None)
    return None, None


def _union(members: list[ast.expr]) -> tuple[str | None, tuple[str, ...] | None]:
    kinds = [
        _parse(one) for one in members if not (isinstance(one, ast.Constant) and one.value is None)
    ]
    said = [one for one in kinds if one[0] is not None]
    if len(said) == 1:
        return said[0]
    names = {one[0] for one in said}
    for kind in ("str", "float", "int"):
        if f"{kind}s" in names:
            return f"{kind}+" if names & {"str", "float", "int", "bool"} else f"{kind}s", None
    for kind in ("str", "float", "int"):
        if kind in names:
            return kind, None
    return None, None


def passed_on(kind: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `values` that are fields of the configuration class `kind`."""
    return {f.name: values[f.name] for f in dataclasses.fields(kind) if f.name in values}


def check_on_device(values: Mapping[str, Any], *, cuda: bool) -> None:
    """Whether settings that were passed on exist here and can work.

    Raises InvalidArgument, naming the option: it is no field of this Megatron, or it is fixed here,
    or it needs a GPU and there is none.
    """
    known = {field.name: field for field in megatron_fields()}
    for name, value in values.items():
        flag = f"--{name.replace('_', '-')}"
        field = known.get(name)
        if field is None:
            raise _refused(
                flag,
                "a field of a configuration class of the installed megatron-core",
                value,
                "install the version of megatron-core that has it",
            )
        if field.refusal is not None:
            raise _refused(flag, f"nothing: {field.refusal}", value)
        if not cuda and value and name in ON_GPU_ONLY:
            raise _refused(flag, f"off without a GPU: {ON_GPU_ONLY[name]}", value)


def _refused(on: str, expected: object, found: object, do: str | None = None) -> InvalidArgument:
    return InvalidArgument(
        explain(
            "passing settings on to Megatron-Core", on=on, expected=expected, found=found, do=do
        )
    )
