"""The sandboxed process: reads code, confines itself, runs it. Started by `process`, by its path.

It imports nothing of this project. The end of standard input ends the code; descriptor `report`
gets one line of JSON that says what is enforced, and is closed before the code runs. Exit status: 0
ended, 1 raised or left with another status than 0, 3 out of memory, 4 not confined as required.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import sys
import traceback
from typing import Any

_NAME = "<tool>"


def _kernel() -> Any:
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "kernel.py")
    spec = importlib.util.spec_from_file_location("kernel", path)
    if spec is None or spec.loader is None:
        raise ImportError(path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _run(source: str) -> None:
    """As an interactive session does: the value of a last expression is shown."""
    tree = ast.parse(source, _NAME)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    names = {"__name__": "__main__", "__builtins__": __builtins__}
    exec(compile(tree, _NAME, "exec"), names)
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), _NAME, "eval"), names)
        if value is not None:
            print(repr(value))


def main() -> int:
    """Returns the exit status."""
    told = json.loads(sys.argv[1])
    source = sys.stdin.buffer.read().decode("utf-8")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    enforced = _kernel().confine(told["limits"], writable=told["folder"], readable=told["readable"])
    with os.fdopen(told["report"], "w") as report:
        report.write(json.dumps(enforced) + "\n")
    if any(enforced[name] for name in told["require"]):
        return 4
    try:
        _run(source)
    except SystemExit as leaving:
        code = leaving.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
        return 0 if code is None or code == 0 else 1
    except MemoryError:
        print("MemoryError: the memory limit was reached", file=sys.stderr)
        return 3
    except BaseException as error:
        # Of the code alone: the frames of this file say nothing to its author.
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != _NAME:
            trace = trace.tb_next
        print(
            "".join(traceback.format_exception(type(error), error, trace)), end="", file=sys.stderr
        )
        return 1
    return 0


if __name__ == "__main__":
    status = main()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)
