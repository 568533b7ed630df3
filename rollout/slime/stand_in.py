"""What functions written for slime or Miles import from there, where neither is installed.

Only names that such functions use; whatever else they import is missing, and said to be.
"""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import Mapping
from functools import lru_cache
from types import ModuleType
from typing import Any

from ledger.errors import EngineFailed, MissingDependency, explain
from rollout.slime.sample import Sample

__all__ = ["PACKAGES", "GenerateState", "generate", "get", "offer", "post"]

PACKAGES = ("slime", "miles")


async def post(url: str, payload: Any, max_retries: int = 1, headers: Any = None) -> Any:
    """POST JSON, and the JSON that comes back. `max_retries` is slime's, and not used.

    Raises EngineFailed for another status than 200.
    """
    return await _ask("POST", url, payload, headers)


async def get(url: str) -> Any:
    """GET, and the JSON that comes back. Raises EngineFailed for another status than 200."""
    return await _ask("GET", url, None, None)


async def _ask(method: str, url: str, payload: Any, headers: Mapping[str, str] | None) -> Any:
    try:
        import aiohttp
    except ImportError as error:
        raise MissingDependency(
            explain("asking the engine", expected="the package aiohttp", found=str(error))
        ) from error
    # The engine takes the time that it takes; the call as a whole has a limit.
    limit = aiohttp.ClientTimeout(total=None)
    async with (
        aiohttp.ClientSession(timeout=limit) as client,
        client.request(method, url, json=payload, headers=headers) as answer,
    ):
        if answer.status != 200:
            raise EngineFailed(
                explain(
                    "asking the engine",
                    on=url,
                    expected="status 200",
                    found=f"{answer.status}: {(await answer.text())[:500]}",
                )
            )
        return await answer.json()


@lru_cache(maxsize=4)
def _tokenizer(folder: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


class GenerateState:
    """What slime's functions keep between calls: tokenizer, arguments, a limit of requests."""

    def __init__(self, args: Any) -> None:
        """The tokenizer of `args.hf_checkpoint` is loaded once a process."""
        self.args = args
        self.tokenizer = _tokenizer(str(args.hf_checkpoint))
        self.processor = None
        self.semaphore = asyncio.Semaphore(args.sglang_server_concurrency)
        self.aborted = False


async def generate(args: Any, sample: Sample, sampling_params: Mapping[str, Any]) -> Sample:
    """One turn, from the prompt or from the tokens that the sample has."""
    if not sample.tokens:
        tokenizer = GenerateState(args).tokenizer
        sample.tokens = tokenizer.encode(sample.prompt, add_special_tokens=False)
    limit = sampling_params["max_new_tokens"] - sample.response_length
    output = await post(
        f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate",
        {
            "input_ids": sample.tokens,
            "sampling_params": {**sampling_params, "max_new_tokens": limit},
            "return_logprob": True,
        },
    )
    pairs = output["meta_info"]["output_token_logprobs"]
    sample.append_response_tokens(
        args,
        tokens=[pair[1] for pair in pairs],
        log_probs=[pair[0] for pair in pairs],
        meta_info=output["meta_info"],
        text=output["text"],
    )
    return sample


def offer(package: str) -> None:
    """Let imports from `package`, one of `PACKAGES` that is not installed, find what is here."""
    from rollout.filters import DynamicFilterOutput, check_reward_nonzero_std
    from rollout.imports import load_function

    names: dict[str, dict[str, Any]] = {
        "": {},
        ".utils": {},
        ".utils.types": {"Sample": Sample},
        ".utils.http_utils": {"post": post, "get": get},
        ".utils.misc": {"load_function": lambda path: load_function(path, setting="load_function")},
        ".rollout": {},
        ".rollout.sglang_rollout": {"GenerateState": GenerateState, "generate": generate},
        ".rollout.filter_hub": {},
        ".rollout.filter_hub.base_types": {"DynamicFilterOutput": DynamicFilterOutput},
        ".rollout.filter_hub.dynamic_sampling_filters": {
            "check_reward_nonzero_std": check_reward_nonzero_std
        },
    }
    for name, members in names.items():
        module = ModuleType(package + name, "Stands for what is not installed: rollout.slime.")
        module.__path__ = []
        vars(module).update(members)
        sys.modules[package + name] = module
        parent, _, last = (package + name).rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)
    importlib.invalidate_caches()
