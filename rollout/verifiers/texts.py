"""Answers as texts: the last box of a response, and the overlap of words."""

from __future__ import annotations

import re
import string
from collections import Counter

__all__ = ["f1_score", "last_boxed"]

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def last_boxed(text: str) -> str | None:
    r"""What stands in the last `\boxed{…}` or `\fbox{…}` whose braces close; None without one."""
    for found in reversed(list(re.finditer(r"\\(?:boxed|fbox)\s*\{", text))):
        depth = 1
        for at in range(found.end(), len(text)):
            if text[at] in "{}" and text[at - 1] != "\\":
                depth += 1 if text[at] == "{" else -1
                if depth == 0:
                    return text[found.end() : at]
    return None


def f1_score(answer: str, label: str) -> tuple[float, float, float]:
    """F1, precision and recall of the words of an answer.

    Words are compared in lower case without punctuation and articles: Rajpurkar, Zhang, Lopyrev,
    Liang, "SQuAD" (EMNLP 2016), section 6.1. 0 where there is no common word.
    """
    said, wanted = _words(answer), _words(label)
    common = sum((Counter(said) & Counter(wanted)).values())
    if not common:
        return 0.0, 0.0, 0.0
    precision, recall = common / len(said), common / len(wanted)
    return 2 * precision * recall / (precision + recall), precision, recall


def _words(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()
