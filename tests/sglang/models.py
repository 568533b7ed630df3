"""Tiny Qwen3 models with random weights and a tokenizer whose ids are bytes.

No warm-up: nothing here depends on what a model can do. Bytes that are no UTF-8 are sampled all the
time, so what an engine answers is rarely what its text would encode to.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

__all__ = ["EOS_TOKEN_ID", "TEMPLATE", "VOCAB_SIZE", "byte_tokenizer", "make_model"]

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
EOS_TOKEN_ID = 258
VOCAB_SIZE = 259


def byte_tokenizer() -> Any:
    """256 bytes, then `<|endoftext|>`, `<|im_start|>`, `<|im_end|>`; with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = sorted(pre_tokenizers.ByteLevel.alphabet())
    names += ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = Tokenizer(models.BPE(vocab={n: i for i, n in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(names[256:])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
        chat_template=TEMPLATE,
    )


def make_model(folder: Path, *, moe: bool, seed: int) -> Path:
    """A Hugging Face folder: two layers of width 64; of a mixture, eight experts, two a token."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 2048,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": EOS_TOKEN_ID,
        "pad_token_id": 256,
        # Wide enough that a distribution has likely and unlikely tokens.
        "initializer_range": 0.2,
        "dtype": "float32",
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if moe:
            model: Any = Qwen3MoeForCausalLM(
                Qwen3MoeConfig(
                    **sizes,
                    moe_intermediate_size=32,
                    num_experts=8,
                    num_experts_per_tok=2,
                    norm_topk_prob=True,
                    decoder_sparse_step=1,
                    mlp_only_layers=[],
                )
            )
        else:
            model = Qwen3ForCausalLM(Qwen3Config(**sizes))
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder
