"""A character tokenizer as a real Hugging Face fast tokenizer: one id a character, exact."""

from __future__ import annotations

from typing import Any

__all__ = ["CHARACTERS", "EOS_TOKEN_ID", "PAD_TOKEN_ID", "VOCAB_SIZE", "character_tokenizer"]

CHARACTERS = "0123456789+-*=,. abcdefghijklmnopqrstuvwxyz?:>\n"
_SPECIAL = ("<pad>", "<unk>", "<eos>")
PAD_TOKEN_ID, EOS_TOKEN_ID = 0, 2
VOCAB_SIZE = 64


def character_tokenizer() -> Any:
    """A `PreTrainedTokenizerFast` over `CHARACTERS`; `save_pretrained` writes it."""
    from tokenizers import AddedToken, Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    names = [*_SPECIAL, *CHARACTERS]
    # Reserved names fill the vocabulary up, so that every id the model can sample decodes.
    names += [f"<reserved_{i}>" for i in range(VOCAB_SIZE - len(names))]
    # Byte-pair encoding without merges: a character is a token.
    tokenizer = Tokenizer(
        models.BPE(vocab={n: i for i, n in enumerate(names)}, merges=[], unk_token="<unk>")
    )
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(n, special=True) for n in names if len(n) > 1])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        unk_token="<unk>",
        eos_token="<eos>",
        clean_up_tokenization_spaces=False,
    )
