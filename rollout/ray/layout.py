"""Where engines, rollout workers and trainer ranks go: one file says it for all commands.

    colocate = false        # true: engines on the devices of the trainer
    strategy = "PACK"       # or SPREAD, STRICT_PACK, STRICT_SPREAD: engines and workers over hosts
    device = "gpu"          # or "cpu": a device is then a processor core, for tests and small runs

    [trainer]
    nodes = 1               # hosts
    gpus_per_node = 4       # devices on each: one rank a device

    [engines]
    number = 2
    gpus = 2                # devices of each
    tp = 2                  # tensor parallel size of each; default: all its devices
    cpus = 1                # processor cores beside its devices

    [workers]
    number = 8              # processes that run environments and rewards; 0: in ledger-rollout
    cpus = 1                # processor cores of each

A section that is left out has its defaults, which are one of each with one device.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ledger.errors import InvalidArgument, NotFound, explain

__all__ = [
    "DEVICES",
    "STRATEGIES",
    "EnginesLayout",
    "Layout",
    "TrainerLayout",
    "WorkersLayout",
    "explained",
    "needed_by",
    "read_layout",
]

STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
"""Ray's: together if possible, apart if possible, and each of them or not at all."""
DEVICES = ("gpu", "cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerLayout:
    """Ranks of the trainer."""

    nodes: int = 1
    gpus_per_node: int = 1

    @property
    def devices(self) -> int:
        """Of all hosts, and so ranks."""
        return self.nodes * self.gpus_per_node


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginesLayout:
    """Engines, all alike."""

    number: int = 1
    gpus: int = 1
    """Devices of each."""
    tp: int | None = None
    """None: all its devices."""
    cpus: int = 1

    @property
    def tensor_parallel(self) -> int:
        """Devices that hold one copy of the weights."""
        return self.gpus if self.tp is None else self.tp


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersLayout:
    """Processes that run environments and rewards."""

    number: int = 0
    cpus: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """All of it. Raises InvalidArgument where made of what cannot be."""

    colocate: bool = False
    strategy: str = "PACK"
    device: str = "gpu"
    trainer: TrainerLayout = field(default_factory=TrainerLayout)
    engines: EnginesLayout = field(default_factory=EnginesLayout)
    workers: WorkersLayout = field(default_factory=WorkersLayout)

    def __post_init__(self) -> None:
        """Check each number, and how they fit."""
        _one_of("strategy", self.strategy, STRATEGIES)
        _one_of("device", self.device, DEVICES)
        for on, value, least in (
            ("trainer.nodes", self.trainer.nodes, 1),
            ("trainer.gpus_per_node", self.trainer.gpus_per_node, 1),
            ("engines.number", self.engines.number, 1),
            ("engines.gpus", self.engines.gpus, 1),
            ("engines.tp", self.engines.tensor_parallel, 1),
            ("engines.cpus", self.engines.cpus, 0),
            ("workers.number", self.workers.number, 0),
            ("workers.cpus", self.workers.cpus, 1),
        ):
            if value < least:
                raise _refused(on, f"at least {least}", value)
        gpus, tp = self.engines.gpus, self.engines.tensor_parallel
        if gpus % tp:
            raise _refused(
                "engines.tp",
                f"a divisor of the {gpus} devices of an engine (engines.gpus)",
                tp,
                do="what is left over would be idle: raise engines.gpus, or engines.number",
            )
        if not self.colocate:
            return
        needed, there = self.engines.number * gpus, self.trainer.devices
        if needed > there:
            raise _refused(
                "colocate",
                f"engines on at most the trainer's {there} devices",
                f"engines.number × engines.gpus = {self.engines.number} × {gpus} = {needed}",
                do="lower one of them, raise trainer.gpus_per_node, or colocate = false",
            )
        if self.trainer.gpus_per_node % gpus:
            raise _refused(
                "colocate",
                "engines that do not reach over hosts: engines.gpus divides trainer.gpus_per_node",
                f"{gpus} and {self.trainer.gpus_per_node}",
            )

    def trainer_bundles(self) -> list[dict[str, float]]:
        """What Ray is asked for, a host each."""
        cores = self.trainer.gpus_per_node
        if not self.colocate:
            return [self._bundle(self.trainer.gpus_per_node, cores)] * self.trainer.nodes
        beside = [0] * self.trainer.nodes
        for engine in range(self.engines.number):
            beside[self.node_of(engine)] += max(1, self.engines.cpus)
        return [self._bundle(self.trainer.gpus_per_node, cores + more) for more in beside]

    def rollout_bundles(self) -> list[dict[str, float]]:
        """Of the engines where they have devices of their own, then of the workers."""
        engine = self._bundle(self.engines.gpus, self.engines.cpus)
        engines = [] if self.colocate else [engine] * self.engines.number
        return [*engines, *[{"CPU": float(self.workers.cpus)}] * self.workers.number]

    def _bundle(self, devices: int, cores: int) -> dict[str, float]:
        if self.device == "cpu":
            return {"CPU": float(max(devices, cores))}
        return {"GPU": float(devices), "CPU": float(max(cores, 1))}

    def node_of(self, engine: int) -> int:
        """With `colocate`: the trainer's host on which an engine is."""
        return engine * self.engines.gpus // self.trainer.gpus_per_node

    def devices_of(self, engine: int) -> list[int]:
        """With `colocate`: the devices of an engine on its host, from 0."""
        first = engine * self.engines.gpus % self.trainer.gpus_per_node
        return list(range(first, first + self.engines.gpus))

    def needed(self) -> dict[str, float]:
        """All that Ray is asked for, by resource."""
        return needed_by([*self.trainer_bundles(), *self.rollout_bundles()])


def needed_by(bundles: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """All that bundles ask for, by resource."""
    total: dict[str, float] = {}
    for bundle in bundles:
        for name, amount in bundle.items():
            total[name] = total.get(name, 0.0) + amount
    return total


def read_layout(path: str | Path) -> Layout:
    """Read a layout file.

    Raises NotFound where there is none; InvalidArgument where it is not TOML, has a name that is
    not known or a value of another type, or asks for what cannot be.
    """
    try:
        text = Path(path).read_text("utf-8")
    except OSError as error:
        raise NotFound(
            explain("reading a layout", on=f"--layout {path}", expected="a file", found=error)
        ) from error
    try:
        said = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InvalidArgument(
            explain("reading a layout", on=f"--layout {path}", expected="TOML", found=error)
        ) from error
    try:
        sections: dict[str, Any] = {
            "trainer": TrainerLayout,
            "engines": EnginesLayout,
            "workers": WorkersLayout,
        }
        values: dict[str, Any] = {}
        for name, value in said.items():
            if name in sections:
                if not isinstance(value, Mapping):
                    raise _refused(name, f"a section [{name}]", value)
                values[name] = sections[name](**_typed(sections[name], value, f"{name}."))
        plain = {name: value for name, value in said.items() if name not in sections}
        return Layout(**_typed(Layout, plain, "", without=sections), **values)
    except InvalidArgument as error:
        raise InvalidArgument(f"{error}\n  file:     {path}") from None


_TYPES: dict[str, tuple[type, str]] = {
    "int": (int, "a whole number"),
    "int | None": (int, "a whole number"),
    "bool": (bool, "true or false"),
    "str": (str, "a text"),
}


def _typed(
    kind: Any, said: Mapping[str, Any], prefix: str, *, without: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    known = {f.name: str(f.type) for f in fields(kind) if f.name not in (without or {})}
    for name, value in said.items():
        if name not in known:
            raise _refused(f"{prefix}{name}", f"one of {', '.join(known)}", f"{name} = {value!r}")
        type_, words = _TYPES[known[name]]
        if not isinstance(value, type_) or (type_ is int and isinstance(value, bool)):
            raise _refused(f"{prefix}{name}", words, repr(value))
    return dict(said)


def _one_of(on: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise _refused(on, f"one of {', '.join(known)}", repr(value))


def _refused(on: str, expected: object, found: object, do: str | None = None) -> InvalidArgument:
    return InvalidArgument(
        explain("checking a layout", on=on, expected=expected, found=found, do=do)
    )


def explained(layout: Layout) -> str:
    """The layout in words, as --explain-layout prints it."""
    trainer, engines, workers = layout.trainer, layout.engines, layout.workers
    device = {"gpu": "GPU", "cpu": "processor core"}[layout.device]
    lines = [
        f"trainer   {_count(trainer.devices, 'rank')} on {_count(trainer.nodes, 'host')}, "
        f"one {device} each",
        f"engines   {_count(engines.number, 'engine')} with {_count(engines.gpus, device)} each, "
        f"tensor parallel {engines.tensor_parallel}"
        + (
            f", {engines.gpus // engines.tensor_parallel} pipeline stages"
            if engines.gpus != engines.tensor_parallel
            else ""
        ),
    ]
    if layout.colocate:
        lines.append("          on the trainer's devices:")
        for engine in range(engines.number):
            devices = ", ".join(map(str, layout.devices_of(engine)))
            lines.append(f"          engine {engine}: host {layout.node_of(engine)}, {devices}")
    else:
        lines.append(f"          on devices of their own, strategy {layout.strategy}")
    lines.append(
        f"workers   {_count(workers.number, 'process', 'processes')} with "
        f"{_count(workers.cpus, 'processor core')} each"
        if workers.number
        else "workers   none: ledger-rollout runs environments and rewards itself"
    )
    asked = [*layout.trainer_bundles(), *layout.rollout_bundles()]
    lines.append(f"Ray       {_count(len(asked), 'bundle')}: " + ", ".join(map(_bundle, asked)))
    lines.append(f"          in all {_bundle(layout.needed())}, and a core for each command")
    return "\n".join(lines)


def _count(number: int, one: str, many: str | None = None) -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"


def _bundle(bundle: Mapping[str, float]) -> str:
    return " + ".join(f"{amount:g} {name}" for name, amount in sorted(bundle.items()))
