"""What a client of SGLang must know of a model: from its config.json, without loading it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ledger.errors import Corrupt, InvalidArgument, NotFound, explain

__all__ = ["ModelFacts", "read_model_facts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Sizes of a model, under the names that this project gives them."""

    model_type: str
    vocab_size: int
    max_positions: int
    num_layers: int
    num_experts: int = 0
    """Routed experts a layer; 0 for a dense model."""
    topk: int = 0
    """Experts a token."""
    moe_layers: tuple[int, ...] = ()
    """Numbers of the layers that have experts, in model order."""
    indexer_topk: int = 0
    """Positions that a sparse-attention indexer leaves; 0 without one."""
    end_token_ids: tuple[int, ...] = ()
    """Ids at which SGLang ends every request, whatever its stop_token_ids: of config.json,
    generation_config.json and the tokenizer; ascending."""


def read_model_facts(folder: str | Path) -> ModelFacts:
    """Read the facts of a Hugging Face folder.

    Raises:
        NotFound: no config.json.
        Corrupt: one of the files is not a JSON object.
        InvalidArgument: a size that is needed is not there or not a number.
    """
    folder = Path(folder)
    whole = _object(folder / "config.json")
    if whole is None:
        raise NotFound(
            explain(
                "reading what the engine's client must know of a model",
                on=str(folder),
                expected="a Hugging Face folder with config.json",
                found="no config.json" if folder.is_dir() else "no such folder",
                do="name a folder on this host: the client reads its config.json and tokenizer",
            )
        )
    text = whole.get("text_config")
    config = {**whole, **text} if isinstance(text, Mapping) else whole
    layers = _number(config, folder, "num_hidden_layers")
    experts = _first(config, "num_experts", "num_local_experts", "n_routed_experts")
    moe_layers = _moe_layers(config, layers) if experts else ()
    return ModelFacts(
        model_type=str(whole.get("model_type", "")),
        vocab_size=_number(config, folder, "vocab_size"),
        max_positions=_number(config, folder, "max_position_embeddings"),
        num_layers=layers,
        num_experts=experts if moe_layers else 0,
        topk=_first(config, "num_experts_per_tok", "top_k_experts") if moe_layers else 0,
        moe_layers=moe_layers,
        indexer_topk=_first(config, "index_topk"),
        end_token_ids=_end_token_ids(folder, whole, config),
    )


def _moe_layers(config: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """Which layers have experts: by the keys of Qwen-MoE, DeepSeek and GLM, Mixtral.

    A wrong answer cannot pass unseen: SGLang reports zeros for a layer without experts, and the
    client compares that with what is said here.
    """
    kinds = config.get("mlp_layer_types")
    if isinstance(kinds, list) and len(kinds) == layers:
        return tuple(i for i, kind in enumerate(kinds) if kind == "sparse")
    dense_first = _first(config, "first_k_dense_replace")
    frequency = config.get("moe_layer_freq", 1)
    if isinstance(frequency, list) and len(frequency) == layers:
        return tuple(i for i, sparse in enumerate(frequency) if sparse)
    step = _first(config, "decoder_sparse_step") or 1
    dense = set(config.get("mlp_only_layers") or ())
    return tuple(
        i
        for i in range(layers)
        if i >= dense_first
        and i % (frequency if isinstance(frequency, int) and frequency > 0 else 1) == 0
        and (i + 1) % step == 0
        and i not in dense
    )


def _end_token_ids(
    folder: Path, whole: Mapping[str, Any], config: Mapping[str, Any]
) -> tuple[int, ...]:
    """As SGLang finds them (configs/model_config.py and utils/hf_transformers/common.py)."""
    ids: set[int] = set()
    for source in (whole, config, _object(folder / "generation_config.json") or {}):
        found = source.get("eos_token_id")
        ids |= {int(i) for i in (found if isinstance(found, list) else [found]) if i is not None}
    named = (_object(folder / "tokenizer_config.json") or {}).get("eos_token")
    if isinstance(named, Mapping):
        named = named.get("content")
    for token in (_object(folder / "tokenizer.json") or {}).get("added_tokens", []):
        if token.get("content") in (named, "<|eom_id|>"):
            ids.add(int(token["id"]))
    return tuple(sorted(ids))


def _object(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        found = f"{type(error).__name__}: {error}"
    if not isinstance(found, dict):
        raise Corrupt(
            explain(
                "reading what the engine's client must know of a model",
                on=str(path),
                expected="a JSON object",
                found=found if isinstance(found, str) else f"a {type(found).__name__}",
                do="copy it again",
            )
        )
    return found


def _first(config: Mapping[str, Any], *names: str) -> int:
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and value > 0:
            return value
    return 0


def _number(config: Mapping[str, Any], folder: Path, name: str) -> int:
    value = _first(config, name)
    if not value:
        raise InvalidArgument(
            explain(
                "reading what the engine's client must know of a model",
                on=str(folder / "config.json"),
                expected=f"a number {name}",
                found=config.get(name),
            )
        )
    return value
