"""Tools: calls that fit and calls that do not, and code in a process that cannot do harm."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest

from ledger.errors import InvalidArgument
from rollout.tools.parsing import parse_tool_calls, tool_parser
from rollout.tools.python import PythonTool
from rollout.tools.sandbox import process
from rollout.tools.sandbox.kernel import CHECKS
from rollout.tools.sandbox.process import SandboxLimits, run_python
from rollout.tools.tool import ToolAnswer, ToolBox

LIMITS = SandboxLimits(wall_s=60, cpu_s=1, memory_bytes=256 * 2**20, output_bytes=1000)
HASTY = SandboxLimits(wall_s=1.5)

PROGRAMS = {
    "value": ("x = 6\nx * 7", LIMITS),
    "files": ("open('a', 'w').write('b'); print(open('a').read())", LIMITS),
    "raises": ("def f():\n    return 1 / 0\nf()", LIMITS),
    "loop": ("print('begun', flush=True)\nwhile True: pass", LIMITS),
    "sleeps": ("import time; time.sleep(600)", HASTY),
    "forks": (
        "import os, time\nmade = 0\nwhile made < 50:\n    try:\n        pid = os.fork()\n"
        "    except OSError as error:\n        print(error); break\n    made += 1\n"
        "    if pid == 0: time.sleep(600)\nprint('made', made)",
        LIMITS,
    ),
    "memory": ("x = bytearray(10**9)", LIMITS),
    "threads": (
        "import threading, time\nn = 0\ntry:\n    while n < 500:\n        threading.Thread("
        "target=time.sleep, args=(600,), daemon=True).start(); n += 1\n"
        "except RuntimeError: pass\nprint(n < 500)",
        LIMITS,
    ),
    "output": ("print('a' * 600 + 'b' * 4000 + 'c' * 600)", LIMITS),
    "endless output": ("while True: print('x' * 1000)", LIMITS),
    "socket": ("import socket; socket.socket()", LIMITS),
    "reads": (
        "import os\ntry: os.listdir(os.path.expanduser('/root'))\n"
        "except OSError as error: print(error.errno)\n"
        f"open({__file__!r})",
        LIMITS,
    ),
    "writes": ("open('/tmp/of-a-sandbox', 'w')", LIMITS),
    "kills": ("import os; os.kill(os.getppid(), 9)", LIMITS),
    "leaves": ("import os; os.setsid()", LIMITS),
    "limits": ("import resource as r; r.setrlimit(r.RLIMIT_CPU, (500, 500))", LIMITS),
    "variables": ("import os; print(sorted(os.environ))", LIMITS),
    "big file": ("f = open('f', 'wb')\nfor _ in range(40): f.write(b'x' * 2**20)", LIMITS),
    "ends itself": ("raise SystemExit(3)", LIMITS),
}


@pytest.fixture(scope="module")
def ran():
    """What became of each program."""
    os.environ["A_SECRET"] = "hunter2"

    async def all_of_them():
        both = asyncio.Semaphore(2)

        async def one(code, limits):
            async with both:
                return await run_python(code, limits)

        return await asyncio.gather(*(one(*program) for program in PROGRAMS.values()))

    try:
        return dict(zip(PROGRAMS, asyncio.run(all_of_them()), strict=True))
    finally:
        del os.environ["A_SECRET"]


def enforced(ran, name):
    """Skips where the kernel has not what it takes; a sandbox that does not use it fails."""
    why = ran["value"].not_enforced.get(name, "")
    if name == "files" and "no Landlock" in why:
        pytest.skip(why)
    if name != "files" and "Seccomp:" not in Path("/proc/self/status").read_text():
        pytest.skip("this kernel has no seccomp")
    assert not why


def test_a_program_prints_and_its_last_value_is_shown(ran):
    assert (ran["value"].output, ran["value"].ended) == ("42\n", "finished")
    assert (ran["files"].output, ran["files"].ended) == ("b\n", "finished")
    assert ran["ends itself"].ended == "raised"


def test_what_is_not_enforced_is_said(ran):
    assert set(ran["value"].not_enforced) <= set(CHECKS)


def test_an_exception_shows_the_programs_own_frames_alone(ran):
    assert ran["raises"].ended == "raised"
    assert ran["raises"].output.splitlines() == [
        "Traceback (most recent call last):",
        '  File "<tool>", line 3, in <module>',
        '  File "<tool>", line 2, in f',
        "ZeroDivisionError: division by zero",
    ]


def test_time_is_limited(ran):
    assert (ran["loop"].ended, ran["loop"].output) == ("cpu time", "begun\n")
    assert ran["sleeps"].ended == "wall time"
    assert ran["sleeps"].wall_s < 60


def test_memory_threads_and_files_are_limited(ran):
    assert ran["memory"].ended == "memory"
    assert ran["threads"].output == "True\n"
    assert "File too large" in ran["big file"].output


def test_output_is_cut_and_says_so(ran):
    assert ran["output"].output == (
        "a" * 500 + "\n[output cut: 4201 of 5201 bytes left out]\n" + "c" * 499 + "\n"
    )
    assert ran["endless output"].ended == "output"
    assert len(ran["endless output"].output) < 1100


def test_no_process_and_no_signal(ran):
    enforced(ran, "processes")
    assert ran["forks"].output.splitlines()[-1] == "made 0"
    for name in ("kills", "leaves"):
        assert "Operation not permitted" in ran[name].output


def test_no_network(ran):
    enforced(ran, "network")
    assert "Operation not permitted" in ran["socket"].output


def test_no_files_of_others(ran):
    enforced(ran, "files")
    assert "Permission denied" in ran["reads"].output
    assert "Permission denied" in ran["writes"].output


def test_limits_stay_and_variables_do_not_come_in(ran):
    assert "not allowed" in ran["limits"].output
    assert "A_SECRET" not in ran["variables"].output


def test_what_cannot_be_enforced_is_said_and_not_run_where_it_is_required(tmp_path, monkeypatch):
    """In a kernel that has no Landlock: its call has another number here."""
    for name in ("child.py", "kernel.py"):
        shutil.copy(Path(process.__file__).with_name(name), tmp_path)
    kernel = (tmp_path / "kernel.py").read_text()
    (tmp_path / "kernel.py").write_text(kernel.replace("syscall(444", "syscall(4444"))
    monkeypatch.setattr(process, "_CHILD", tmp_path / "child.py")
    done = asyncio.run(run_python("1", LIMITS))
    assert list(done.not_enforced) == ["files"]
    assert "Landlock" in done.not_enforced["files"]
    with pytest.raises(InvalidArgument, match=r"(?s)enforced by this kernel.*no Landlock"):
        asyncio.run(run_python("1", replace(LIMITS, require=("files",))))
    with pytest.raises(InvalidArgument, match="require"):
        SandboxLimits(require=("virtual machine",))
    with pytest.raises(InvalidArgument, match="wall_s"):
        SandboxLimits(wall_s=0)


def test_cancelled_nothing_is_left(tmp_path):
    """The process is waited for, so that its end is known before the caller goes on."""

    async def give_up():
        before = children()
        task = asyncio.create_task(run_python("while True: pass", LIMITS))
        while not children() - before:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return children() - before

    def children():
        return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())

    assert asyncio.run(give_up()) == set()


class Adds:
    name, description = "add", "adds two numbers"
    parameters: ClassVar = {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    }

    async def __call__(self, arguments):
        return ToolAnswer(text=str(arguments["a"] + arguments["b"]))


def asked(*calls):
    said = "".join(f"<tool_call>{json.dumps(call)}</tool_call>" for call in calls)
    return asyncio.run(ToolBox([Adds()]).answer(parse_tool_calls(said)))


def test_calls_are_answered_in_order_and_mistakes_are_told():
    answers = asked(
        {"name": "add", "arguments": {"a": 1, "b": 2}},
        {"name": "subtract", "arguments": {}},
        {"name": "add", "arguments": {"a": 1}},
        {"name": "add", "arguments": {"a": True, "b": 2}},
        {"name": "add", "arguments": {"a": 1, "b": 2, "c": 3}},
        {"name": "add", "arguments": 5},
    )
    assert [one.ok for one in answers] == [True, False, False, False, False, False]
    assert [one.text for one in answers[:5]] == [
        "3",
        "error: no tool 'subtract'; there are: add",
        "error: add: argument 'b' is missing",
        "error: add: argument 'a' is no integer: true",
        "error: add: no argument 'c'; there are: a, b",
    ]
    assert "this is no tool call" in answers[5].text
    with pytest.raises(InvalidArgument, match="a name for each"):
        ToolBox([Adds(), Adds()])


def test_a_fenced_block_is_a_call():
    parsed = parse_tool_calls("So:\n```python\nprint(1)\n```\nThen\n```\nx\n```", "code_block")
    assert [call.loaded() for call in parsed.calls] == [{"code": "print(1)\n"}]
    assert parsed.content.startswith("So:")
    assert "print" not in parsed.content
    assert tool_parser("tests.rollout.test_tools:no_calls")("x").content == "X"


def no_calls(text):
    return parse_tool_calls(text.upper(), "none")


def test_the_python_tool_says_what_stopped_a_program():
    tool = PythonTool(LIMITS)

    async def both():
        return await asyncio.gather(
            tool({"code": "print('so far', flush=True)\nx = bytearray(10**9)"}), tool({"code": ""})
        )

    stopped, silent = asyncio.run(both())
    assert not stopped.ok
    assert stopped.text.startswith("so far\n")
    assert stopped.text.endswith("[stopped: more than 256 MiB of memory]")
    assert (silent.ok, silent.text) == (True, "[no output]")
