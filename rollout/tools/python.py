"""The tool that runs Python code in a sandbox."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollout.tools.sandbox.process import Execution, SandboxLimits, run_python
from rollout.tools.tool import ToolAnswer

__all__ = ["PythonTool"]


class PythonTool:
    """Runs a program and says what it printed. Each call is a new process: nothing is kept."""

    name = "python"
    description = (
        "Runs a Python program in a sandbox without network and returns what it prints, and the "
        "value of a last expression. Nothing is kept between calls."
    )
    parameters: Mapping[str, Any] = {
        "type": "object",
        "properties": {"code": {"type": "string", "description": "The program."}},
        "required": ["code"],
    }

    def __init__(self, limits: SandboxLimits | None = None) -> None:
        """`limits` of each call."""
        self.limits = limits or SandboxLimits()

    async def __call__(self, arguments: Mapping[str, Any]) -> ToolAnswer:
        """Run `arguments["code"]`. Raises what `run_python` raises."""
        done = await run_python(arguments["code"], self.limits)
        return ToolAnswer(text=self._told(done), ok=done.ended == "finished")

    def _told(self, done: Execution) -> str:
        reason = {
            "finished": "",
            "raised": "",
            "wall time": f"stopped after {self.limits.wall_s:g} seconds",
            "cpu time": f"stopped after {self.limits.cpu_s:g} seconds of computing",
            "memory": f"stopped: more than {self.limits.memory_bytes >> 20} MiB of memory",
            "output": "stopped: it printed too much",
            "killed": "the program crashed",
        }[done.ended]
        # Not how long it took: the same program says the same again.
        told = done.output.rstrip("\n")
        if reason:
            told += ("\n" if told else "") + f"[{reason}]"
        return told or "[no output]"
