"""The chat template of a model folder, where a tokenizer keeps it."""

from __future__ import annotations

import json
from pathlib import Path

from blake3 import blake3

__all__ = ["chat_template_digest"]


def chat_template_digest(folder: Path) -> bytes | None:
    """blake3 of the template's text; None where the folder has none.

    `chat_template.jinja` goes before `chat_template` in `tokenizer_config.json`, as transformers
    reads them; of several by name, the one that is called default.
    """
    template = folder / "chat_template.jinja"
    if template.is_file():
        return blake3(template.read_bytes()).digest()
    config = folder / "tokenizer_config.json"
    if not config.is_file():
        return None
    found = json.loads(config.read_text(encoding="utf-8")).get("chat_template")
    if isinstance(found, list):
        found = {one["name"]: one["template"] for one in found}.get("default")
    return blake3(found.encode()).digest() if isinstance(found, str) else None
