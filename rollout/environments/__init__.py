"""Environments by name or import path, for agentic rollouts. See `protocol` for what one is."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from ledger.errors import InvalidArgument, explain
from rollout.environments.protocol import Environment, EnvironmentFactory
from rollout.imports import IMPORT_PATH, is_import_path, load_function
from rollout.rewards import GymReward, create_reward
from rollout.tools.parsing import tool_parser
from rollout.tools.sandbox.process import SandboxLimits

__all__ = ["ENVIRONMENT_NAMES", "create_environment"]

ENVIRONMENT_NAMES = ("reasoning_gym:<dataset>", "python", "calculator", IMPORT_PATH)

_SETTING = "--environment"


def create_environment(
    name: str, options: Mapping[str, Any] | None = None
) -> tuple[EnvironmentFactory, Environment]:
    """What makes the environment of each episode, and one of them, which is not to be driven.

    - `reasoning_gym:<dataset>`: options `attempts`, `discount`, `feedback`.
    - `python`: turns may ask for Python programs, the last one is judged. Options: `parser` (a
      format of `rollout.tools.parsing`, or an import path; default hermes), `reward` (a name or
      import path; default: the rollout's reward function judges the whole response), `wrap`, and
      `limits`, an object of `SandboxLimits`.
    - `calculator`: turns may ask for the value of an expression. Options: `parser`, `reward`,
      `wrap`.
    - an import path: a class or function that makes an environment; options are its arguments.

    Raises:
        InvalidArgument: no such environment, or it does not take the options.
        MissingDependency: a library behind it is not installed.
    """
    given = dict(options or {})
    make = _maker(name, given)
    try:
        first = make()
    except TypeError as error:
        raise _refused(name, "options that it takes", f"{sorted(given)}: {error}") from error
    if inspect.isawaitable(first):
        if inspect.iscoroutine(first):
            first.close()
        raise _refused(name, "a plain function or class", "a coroutine function")
    for method in ("reset", "step", "close"):
        if not callable(getattr(first, method, None)):
            raise _refused(name, f"an environment: with a method {method}", type(first).__name__)
    for said in ("name", "version"):
        if not isinstance(getattr(first, said, None), str):
            raise _refused(name, f"an environment with a {said}, a text", type(first).__name__)
    return make, first


def _maker(name: str, given: dict[str, Any]) -> Any:
    family, _, dataset = name.partition(":")
    if family == "reasoning_gym" and dataset:
        from rollout.environments.gym import GymEnvironment

        verifier = GymReward(dataset)  # one for all episodes: a data set takes long to make
        return lambda: GymEnvironment(dataset, verifier=verifier, **given)
    if name in ("python", "calculator"):
        return _with_tools(name, given)
    if is_import_path(name):
        function = load_function(name, setting=_SETTING)
        return lambda: function(**given)
    raise _refused(name, f"one of {', '.join(ENVIRONMENT_NAMES)}", name)


def _with_tools(name: str, given: dict[str, Any]) -> Any:
    from rollout.environments.tool_use import ToolEnvironment

    path = given.pop("reward", None)
    reward = None if path is None else create_reward(path)
    if name == "python":
        from rollout.tools.python import PythonTool

        parse = tool_parser(given.pop("parser", "hermes"))
        limits = dict(given.pop("limits", {}))
        if "require" in limits:
            limits["require"] = tuple(limits["require"])
        try:
            tool: Any = PythonTool(SandboxLimits(**limits))
        except TypeError as error:
            raise _refused(name, "limits of rollout.tools.sandbox", str(error)) from error
    else:
        from rollout.tools.calculator import Calculator

        tool = Calculator()
        parse = tool_parser(given.pop("parser", "rollout.tools.calculator:question_mark_calls"))
    return lambda: ToolEnvironment(name, [tool], parse, reward=reward, **given)


def _refused(name: str, expected: str, found: str) -> InvalidArgument:
    return InvalidArgument(
        explain("making an environment", on=f"{_SETTING} {name}", expected=expected, found=found)
    )
