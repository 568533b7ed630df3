"""docs/algorithms.md names every estimator, option and preset that there is, and no other."""

from __future__ import annotations

import re
from pathlib import Path

from tests.trainer.advantage_cases import EVERY
from trainer.options.advantages import OPTIONS
from trainer.presets import ESTIMATOR_SPELLINGS, PRESETS, Default

PAGE = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def first_cells(text: str) -> list[str]:
    return [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("| `")]


def test_every_estimator_has_its_row() -> None:
    cells = first_cells(section("Advantage estimators"))
    names = [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]
    assert sorted(names) == EVERY


def test_every_option_and_spelling_is_named() -> None:
    text = section("Advantage estimators") + section("Presets")
    flags = set(re.findall(r"--[a-z][a-z-]+", text))
    missing = {o.flag for o in OPTIONS if not flags & {o.flag, f"--no-{o.flag.removeprefix('--')}"}}
    assert missing == set()
    assert all(f"`{name}`" in text for name in ESTIMATOR_SPELLINGS)


def test_each_preset_says_what_it_sets() -> None:
    rows = {}
    for line in section("Presets").splitlines():
        if line.startswith("| `"):
            _, names, said, _ = line.split("|")
            rows |= dict.fromkeys(re.findall(r"`([\w-]+)`", names), said)
    assert set(rows) == set(PRESETS)
    for preset, defaults in PRESETS.items():
        for default in defaults:
            said = rows[preset]
            if default.when.get("policy_loss") and isinstance(default.value, str):
                assert f"`{default.value}`" in said
            else:
                assert re.search(rf"(?<![\w-]){flags_of(default)}(?![\w.-])", said), default
        conditions = {"--use-kl-loss", "--use-rollout-logprobs"}
        named = set(re.findall(r"--[a-z][a-z-]+", rows[preset])) - conditions
        assert named == {flags_of(default).split()[0] for default in defaults} - conditions


def flags_of(default: Default) -> str:
    """As one would type it."""
    name, value = default.option.replace("_", "-"), default.value
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no-{name}"
    return f"--{name} {value if isinstance(value, str) else format(value, 'g')}"
