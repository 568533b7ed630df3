"""Who may import whom, read from the source of every module, and what importing the core costs.

    replay → trainer, rollout → ledger → migrations

Command line modules (`cli.py`) may see everything; nobody imports them but the start of a program.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ALLOWED = {
    "migrations": set(),
    "ledger": {"migrations"},
    "trainer": {"ledger", "migrations"},
    "rollout": {"ledger", "migrations"},
    "replay": {"trainer", "rollout", "ledger", "migrations"},
}
"""Package → the packages of ours that it may import besides itself."""
HEAVY = {"torch", "ray", "sglang", "megatron", "transformers"}
"""What `ledger` and `migrations` never import, but for LATER."""
LATER = {Path("ledger/tensors.py"): {"torch"}}
"""Modules that give what they read to one of those, and import it when that is asked of them."""


def imported(source: str, package: str) -> set[str]:
    """Top-level names that a module imports, anywhere in it, also by name at run time."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.add(package if node.level else (node.module or "").partition(".")[0])
        elif isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            name = node.func.id if isinstance(node.func, ast.Name) else name
            first = node.args[0] if node.args else None
            if (
                name in ("import_module", "__import__")
                and isinstance(first, ast.Constant)
                and isinstance(first.value, str)
            ):
                found.add(first.value.partition(".")[0])
    return found


def at_once(source: str) -> str:
    """The source without its functions: what runs when the module is imported."""
    tree = ast.parse(source)

    class Cut(ast.NodeTransformer):
        def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
            return None

        def visit_If(self, node: ast.If) -> ast.AST | None:
            typing_only = isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
            return None if typing_only else self.generic_visit(node)

    return ast.unparse(Cut().visit(tree))


def forbidden(source: str, package: str, *, is_cli: bool = False) -> set[str]:
    """What a module of `package` imports although it may not."""
    names = imported(source, package)
    wrong = set() if is_cli else (names & ALLOWED.keys()) - ALLOWED[package] - {package}
    if package in ("ledger", "migrations"):
        wrong |= names & HEAVY
    return wrong


MODULES = sorted(
    path.relative_to(ROOT) for package in ALLOWED for path in (ROOT / package).rglob("*.py")
)


@pytest.mark.parametrize("package", ALLOWED)
def test_no_module_imports_what_it_may_not(package: str) -> None:
    wrong = {
        str(path): found
        for path in MODULES
        if path.parts[0] == package
        and (
            found := forbidden(
                (ROOT / path).read_text(encoding="utf-8"),
                package,
                is_cli=path.name in ("cli.py", "__main__.py"),
            )
            - LATER.get(path, set())
        )
    }
    assert wrong == {}


@pytest.mark.parametrize("path", LATER, ids=str)
def test_what_may_be_imported_later_is_not_imported_at_once(path: Path) -> None:
    source = (ROOT / path).read_text(encoding="utf-8")
    assert LATER[path] <= imported(source, "ledger")
    assert not LATER[path] & imported(at_once(source), "ledger")
    # The way of looking finds what it looks for.
    assert imported(at_once("import torch\ndef f():\n    import ray"), "ledger") == {"torch"}


def test_nobody_imports_a_command_line_module() -> None:
    wrong = []
    for path in MODULES:
        if path.name == "__main__.py":
            continue
        for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            wrong += [str(path)] * any(name.endswith(".cli") for name in names)
    # One command line may start another.
    assert [path for path in wrong if not path.endswith("cli.py")] == []


@pytest.mark.parametrize(
    ("source", "package", "wrong"),
    [
        ("import torch", "ledger", {"torch"}),
        ("def f():\n    from megatron.core import x", "ledger", {"megatron"}),
        ("import importlib\nimportlib.import_module('ray.util')", "ledger", {"ray"}),
        ("from rollout.worker import x", "trainer", {"rollout"}),
        ("import trainer.step", "rollout", {"trainer"}),
        ("from replay import x", "trainer", {"replay"}),
        ("from ledger import x", "migrations", {"ledger"}),
        ("from ledger import x\nimport migrations\nimport torch", "trainer", set()),
        ("from . import x", "ledger", set()),
    ],
)
def test_the_rule_itself(source: str, package: str, wrong: set[str]) -> None:
    assert forbidden(source, package) == wrong


@pytest.mark.parametrize(
    "statement",
    [
        "import ledger",
        "import ledger.cli; ledger.cli.main(['--help'])",
        "import ledger; ledger.open_ledger",
    ],
)
def test_the_core_loads_without_what_trains(statement: str) -> None:
    code = (
        f"import sys\n{statement}\nprint(sorted({HEAVY!r} & sys.modules.keys()), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stderr.strip() == "[]"


@pytest.mark.parametrize(
    "statement", ["import ledger", "import ledger.cli; ledger.cli.build_parser()"]
)
def test_the_core_and_its_help_load_no_engine(statement: str) -> None:
    loaded = "[m for m in ('duckdb', 'numpy', 'pyarrow', 'rich', 'sqlalchemy') if m in sys.modules]"
    code = f"import sys\n{statement}\nprint({loaded})"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
