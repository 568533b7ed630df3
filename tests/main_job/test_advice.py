"""What an error tells a user to do can be done: every flag that a message names exists."""

from __future__ import annotations

import re
from pathlib import Path

from ledger.cli import build_parser as ledger_parser
from replay.cli import build_parser as replay_parser
from rollout.cli import build_parser as rollout_parser
from rollout.ray.cli import build_parser as run_parser
from tests.ledger.test_documents import flags_of
from trainer.cli import build_parser as trainer_parser
from trainer.options import OPTIONS, passed_on_options

ROOT = Path(__file__).resolve().parents[2]
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9]*(?:-[a-z0-9]+)+")

ELSEWHERE = {
    *("--api-key", "--untracked-files", "--no-deps", "--model-path"),
    "--lifecycle-configuration",  # not commands of ours
    *("--task-options",),  # rollout.models
    *("--nproc-per-node", "--rdzv-backend", "--rdzv-endpoint"),  # torchrun
    "--shm-size",  # docker
}
SGLANG = {
    *("--disable-overlap-schedule", "--dp-size", "--enable-deterministic-inference"),
    *("--enable-memory-saver", "--enable-return-indexer-topk", "--enable-return-routed-experts"),
    *("--kv-cache-dtype", "--log-level", "--mem-fraction-static", "--pp-size", "--tp-size"),
    *("--flush-cache", "--preferred-sampling-params", "--timeout-s", "--weight-version"),
}
"""Arguments of SGLang's server and of checkpoint-engine's, which are also passed on to it."""
ELSEWHERE |= SGLANG | {f"--sglang-{flag[2:]}" for flag in SGLANG}


def test_every_flag_named_in_code_and_documents_exists() -> None:
    options = (*OPTIONS, *passed_on_options())
    known = {o.flag for o in options} | {f"--no-{o.flag[2:]}" for o in options if o.type is bool}
    for command in (trainer_parser(), rollout_parser(), run_parser()):
        known |= set(command._option_string_actions)
    for parser in (ledger_parser(), replay_parser()):
        known |= set().union(*flags_of(parser).values())
    files = [
        p
        for folder in ("ledger", "rollout", "trainer", "replay")
        for p in (ROOT / folder).rglob("*.py")
    ]
    files += [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    unknown = {
        f"{path.relative_to(ROOT)}: {flag}"
        for path in files
        for flag in FLAG.findall(path.read_text(encoding="utf-8"))
        if flag not in known | ELSEWHERE
    }
    assert len(files) > 50
    assert not unknown
