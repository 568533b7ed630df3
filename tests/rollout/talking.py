"""A tokenizer with a chat template, and an engine that says given texts, for tests of agents."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from rollout.protocol import GenerationRequest, SamplingParams

__all__ = ["END", "Texts", "chat_tokenizer"]

END = "<|im_end|>"

# As Qwen's: tools in a system message, calls and results in tags, earlier thoughts left out.
TEMPLATE = r"""
{%- if tools %}<|im_start|>system
Tools: {% for tool in tools %}{{ tool | tojson }}{% endfor %}<|im_end|>
{% endif %}
{%- set last = namespace(user=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}
{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'tool' %}<|im_start|>user
<tool_response>
{{ m.content }}
</tool_response><|im_end|>
{% elif m.role == 'assistant' %}<|im_start|>assistant
{% if loop.index0 < last.user and '</think>' in m.content %}
{{- m.content.split('</think>')[-1].lstrip('\n') }}
{%- else %}{{ m.content }}{% endif %}
{%- for c in m.tool_calls or [] %}{{ '\n' }}<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% else %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@lru_cache(maxsize=1)
def chat_tokenizer() -> Any:
    """Bytes as tokens, but 'ab' is one: an engine that says a and b apart has drifted."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {c: i for i, c in enumerate([*alphabet, "ab"])}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", END]
    made.add_special_tokens([AddedToken(one, special=True) for one in special])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made,
        eos_token=END,
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


class Texts:
    """A script that says the next text of `texts` at each request, then the end token.

    Letter by letter: 'ab' is said as two tokens. A request that goes on within a turn (its context
    ends with the beginning of the text) goes on with the text.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        """Raises IndexError at a request too many."""
        self.texts = list(texts)
        self.asked: list[str] = []
        """The context of each request, as text."""
        self._turns: dict[int, tuple[int, npt.NDArray[np.int32]]] = {}

    def __call__(
        self, request: GenerationRequest, params: SamplingParams
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        """Ids and log-probs; those of a turn are the same wherever it was cut."""
        tokenizer = chat_tokenizer()
        self.asked.append(tokenizer.decode(request.tokens, skip_special_tokens=False))
        begin, whole = self._turns.get(request.seed, (-1, np.zeros(0, np.int32)))
        if begin < 0:
            text = self.texts.pop(0)
            ids = [i for c in text for i in tokenizer.encode(c, add_special_tokens=False)]
            whole = np.array([*ids, tokenizer.eos_token_id], np.int32)
            begin = len(request.tokens)
            self._turns[request.seed] = begin, whole
        tokens = whole[len(request.tokens) - begin :]
        return tokens, np.linspace(-1, -2, len(tokens), dtype=np.float32)
