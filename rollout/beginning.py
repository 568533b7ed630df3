"""Beginning a run without a trainer: rollouts from a model folder, which a trainer may take up."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from blake3 import blake3

from ledger.canonical import canonical_json, json_digest
from ledger.chat_template import chat_template_digest
from ledger.environment import describe_environment
from ledger.errors import NotFound, explain
from ledger.events import RunStarted, WeightsPublished
from ledger.weights import weights_root
from rollout.model_files import records_of_folder

__all__ = ["first_events", "tokenizer_digest"]

_SIZES = {"float32": 4, "bfloat16": 2}


def first_events(
    model_dir: Path,
    *,
    run_id: str,
    run_seed: int,
    settings: str,
    places: str,
    deterministic: bool,
    num_threads: int,
    dtype: str,
) -> tuple[RunStarted, WeightsPublished]:
    """The run, and its version 0, which lies in `model_dir`; both become real in one append.

    `settings` and `places` are JSON as `run_started` has them, `dtype` what the run trains in.
    Raises what `records_of_folder` raises, and NotFound without a tokenizer.json.
    """
    records = records_of_folder(model_dir, dtype=dtype)
    config = json.loads((model_dir / "config.json").read_text("utf-8"))
    started = RunStarted(
        run_id=run_id,
        run_seed=run_seed,
        settings=settings,
        places=places,
        environment=canonical_json(describe_environment()),
        deterministic=deterministic,
        num_threads=num_threads,
        model_digest=json_digest(config),
        tokenizer_digest=tokenizer_digest(model_dir),
        chat_template_digest=chat_template_digest(model_dir),
    )
    published = WeightsPublished(
        weight_version=0,
        parent_version=None,
        step=None,
        tensor_names=[r.name for r in records],
        tensor_dtypes=[r.dtype for r in records],
        tensor_shapes=[np.array(r.shape, np.int64) for r in records],
        tensor_checksums=[r.checksum for r in records],
        root=weights_root(records),
        size_bytes=sum(int(np.prod(r.shape)) * _SIZES[r.dtype] for r in records),
        location=str(model_dir.absolute()),
        transport="disk",
        acknowledged_by=[],
    )
    return started, published


def tokenizer_digest(model_dir: Path) -> bytes:
    """blake3 of a model folder's tokenizer.json. Raises NotFound where there is none."""
    path = model_dir / "tokenizer.json"
    if not path.is_file():
        raise NotFound(
            explain(
                "reading the tokenizer",
                on=str(model_dir),
                expected="tokenizer.json (a fast tokenizer)",
                found="no such file",
            )
        )
    return blake3(path.read_bytes()).digest()
