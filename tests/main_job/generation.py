"""Functions with slime's signatures, as a user of slime has them."""

from __future__ import annotations

from typing import Any

import aiohttp
from transformers import AutoTokenizer


async def two_turns(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """Ask, say 'ok' to the answer, and ask again."""
    tokenizer = AutoTokenizer.from_pretrained(args.hf_checkpoint)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    sample.tokens = tokenizer.encode(sample.prompt, add_special_tokens=False)
    async with aiohttp.ClientSession() as client:
        for turn in range(2):
            payload = {
                "input_ids": sample.tokens,
                "sampling_params": {**sampling_params, "max_new_tokens": 4},
                "return_logprob": True,
            }
            async with client.post(url, json=payload) as answer:
                answer.raise_for_status()
                output = await answer.json()
            meta = output["meta_info"]
            pairs = meta["output_token_logprobs"]
            sample.append_response_tokens(
                args,
                tokens=[token for _, token, _ in pairs],
                log_probs=[log_prob for log_prob, _, _ in pairs],
                meta_info=meta,
                text=output["text"],
            )
            if turn == 0:
                said = tokenizer.encode("ok", add_special_tokens=False)
                sample.append_response_tokens(args, tokens=said, trainable=False, text="ok")
    return sample


async def length_and_letters(args: Any, sample: Any) -> dict[str, float]:
    """Different for different answers, so that groups have something to learn from."""
    assert sample.loss_mask is not None
    assert sample.loss_mask.count(0) == 2
    return {"score": float(sum(map(ord, sample.response)) % 7), "length": sample.response_length}


def seen(args: Any, sample: Any, *, rollout_id: int | None = None) -> None:
    """Note that the hook saw it."""
    sample.metadata["seen"] = rollout_id
