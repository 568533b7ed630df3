"""What a Hugging Face config.json says about a model, checked, in the terms that Megatron needs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ledger.errors import Corrupt, InvalidArgument, NotFound, explain

__all__ = ["SUPPORTED", "Architecture", "read_architecture", "read_config"]

SUPPORTED = ("LlamaForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
"""Architectures that can be built, by their Hugging Face names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A decoder-only transformer: RMSNorm, rotary positions, grouped queries, SwiGLU."""

    name: str
    """One of SUPPORTED."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    """Width of the dense feed-forward layer."""
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool
    qk_norm: bool
    """RMSNorm of each query and key head."""
    num_experts: int | None = None
    """None: dense."""
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = True
    """Gate weights are a softmax over the chosen experts, not over all."""


def read_config(model_dir: str | Path) -> dict[str, Any]:
    """The config.json of a Hugging Face model folder.

    Raises NotFound where there is none, Corrupt where it is not a JSON object.
    """
    path = Path(model_dir) / "config.json"
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        absent = isinstance(error, FileNotFoundError)
        raise NotFound(
            explain(
                "reading a model",
                on=str(model_dir),
                expected="a Hugging Face model folder with config.json",
                found="no config.json" if absent else f"{type(error).__name__}: {error}",
                do="check --hf-checkpoint",
            )
        ) from error
    except UnicodeDecodeError as error:
        raise Corrupt(
            explain("reading a model", on=str(path), expected="JSON in UTF-8", found=error)
        ) from error
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Corrupt(
            explain("reading a model", on=str(path), expected="JSON", found=error)
        ) from error
    if not isinstance(config, dict):
        raise Corrupt(
            explain("reading a model", on=str(path), expected="a JSON object", found=text[:40])
        )
    return config


def read_architecture(hf_config: Mapping[str, Any]) -> Architecture:
    """Translate and check a configuration.

    Raises InvalidArgument, naming the key, for an architecture or a feature that cannot be built: a
    feature that was ignored in silence would show as other logits.
    """
    names = hf_config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if name not in SUPPORTED:
        raise _unsupported("architectures", f"a list with one of {', '.join(SUPPORTED)}", names)
    _require(hf_config, "hidden_act", ("silu",))
    for key in ("attention_bias", "mlp_bias", "use_sliding_window"):
        _require(hf_config, key, (False, None))
    _require(hf_config, "attention_dropout", (0, 0.0, None))
    _require(hf_config, "pretraining_tp", (1, None))
    heads = _integer(hf_config, "num_attention_heads")
    hidden = _integer(hf_config, "hidden_size")
    experts: dict[str, Any] = {}
    if name == "Qwen3MoeForCausalLM":
        _require(hf_config, "decoder_sparse_step", (1, None))
        _require(hf_config, "mlp_only_layers", ([], None))
        experts = {
            "num_experts": _integer(hf_config, "num_experts", "num_local_experts"),
            "num_experts_per_tok": _integer(hf_config, "num_experts_per_tok"),
            "moe_intermediate_size": _integer(hf_config, "moe_intermediate_size"),
            "norm_topk_prob": bool(hf_config.get("norm_topk_prob", False)),
        }
    return Architecture(
        name=name,
        vocab_size=_integer(hf_config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_integer(hf_config, "intermediate_size"),
        num_hidden_layers=_integer(hf_config, "num_hidden_layers"),
        num_attention_heads=heads,
        num_key_value_heads=_integer(hf_config, "num_key_value_heads", default=heads),
        head_dim=_integer(hf_config, "head_dim", default=hidden // heads),
        max_position_embeddings=_integer(hf_config, "max_position_embeddings"),
        rms_norm_eps=_number("rms_norm_eps", hf_config.get("rms_norm_eps")),
        rope_theta=_rope_theta(hf_config),
        tie_word_embeddings=bool(hf_config.get("tie_word_embeddings", False)),
        qk_norm=name.startswith("Qwen3"),
        **experts,
    )


def _rope_theta(hf_config: Mapping[str, Any]) -> float:
    """Transformers 5 writes rope_parameters; before, rope_theta with an optional rope_scaling."""
    parameters = hf_config.get("rope_parameters") or {}
    scaling = hf_config.get("rope_scaling") or {}
    for key, found in (("rope_parameters", parameters), ("rope_scaling", scaling)):
        if not isinstance(found, Mapping):
            raise _unsupported(key, "an object", found)
        kind = found.get("rope_type", found.get("type", "default"))
        if kind != "default":
            raise _unsupported(key, "rotary positions without scaling ('default')", kind)
    theta = parameters.get("rope_theta", hf_config.get("rope_theta"))
    return _number("rope_theta (here or in rope_parameters)", theta)


def _number(key: str, value: object) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf:
        return float(value)
    raise _unsupported(key, "a number above 0", value)


def _integer(hf_config: Mapping[str, Any], *keys: str, default: int | None = None) -> int:
    """The first of `keys` that is set; `default`, if there is one, where none of them is."""
    if default is not None and all(hf_config.get(key) is None for key in keys):
        return default
    for key in keys:
        value = hf_config.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    raise _unsupported(" or ".join(keys), "a positive whole number", hf_config.get(keys[0]))


def _require(hf_config: Mapping[str, Any], key: str, allowed: tuple[Any, ...]) -> None:
    value = hf_config.get(key)
    if value is not None and value not in allowed:
        raise _unsupported(key, allowed[0], value)


def _unsupported(key: str, expected: object, found: object) -> InvalidArgument:
    return InvalidArgument(
        explain(
            "building a model from its Hugging Face configuration",
            on=key,
            expected=expected,
            found="nothing" if found is None else found,
            do="use a model of a supported architecture, or add it to trainer/architecture.py",
        )
    )
