"""slime's `Sample`, field by field: what custom functions read and write.

It is a working copy for the time of a call. The record is the ledger's: what of a sample counts is
taken from it when the function returns, and compared with what the engine was seen to answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any

from ledger.errors import InvalidArgument, explain

__all__ = ["PrefixCacheInfo", "Sample", "SpecInfo", "Status"]


class Status(Enum):
    """How far a sample is; `Sample.Status`."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


_BY_REASON = {"stop": Status.COMPLETED, "length": Status.TRUNCATED, "abort": Status.ABORTED}


@dataclass
class SpecInfo:
    """Counts of speculative decoding; `Sample.SpecInfo`."""

    spec_accept_token_num: int = 0
    spec_draft_token_num: int = 0
    spec_verify_ct: int = 0
    completion_token_num: int = 0

    @property
    def spec_accept_rate(self) -> float:
        """Drafted tokens that were accepted, as a share."""
        drafted = self.spec_draft_token_num
        return self.spec_accept_token_num / drafted if drafted > 0 else 0.0

    @property
    def spec_accept_length(self) -> float:
        """Tokens of a verification."""
        return self.completion_token_num / self.spec_verify_ct if self.spec_verify_ct > 0 else 0.0

    def add(self, meta_info: Mapping[str, Any]) -> None:
        """Count one answer of the engine."""
        self.spec_accept_token_num += meta_info.get("spec_accept_token_num", 0)
        self.spec_draft_token_num += meta_info.get("spec_draft_token_num", 0)
        self.spec_verify_ct += meta_info.get("spec_verify_ct", 0)
        self.completion_token_num += meta_info.get("completion_tokens", 0)

    def to_dict(self) -> dict[str, int]:
        """As a dictionary."""
        return {one.name: getattr(self, one.name) for one in fields(self)}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> SpecInfo:
        """From `to_dict`; what is missing is 0."""
        return SpecInfo(**{one.name: data.get(one.name, 0) for one in fields(SpecInfo)})


@dataclass
class PrefixCacheInfo:
    """Prompt tokens, and how many the engine had already; `Sample.PrefixCacheInfo`."""

    cached_tokens: int = 0
    total_prompt_tokens: int = 0

    @property
    def prefix_cache_hit_rate(self) -> float:
        """Cached tokens, as a share."""
        return self.cached_tokens / self.total_prompt_tokens if self.total_prompt_tokens else 0.0

    def add(self, meta_info: Mapping[str, Any]) -> None:
        """Count one answer of the engine."""
        self.cached_tokens += meta_info.get("cached_tokens") or 0
        self.total_prompt_tokens += meta_info.get("prompt_tokens") or 0

    def to_dict(self) -> dict[str, int]:
        """As a dictionary."""
        return {one.name: getattr(self, one.name) for one in fields(self)}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> PrefixCacheInfo:
        """From `to_dict`; what is missing is 0."""
        return PrefixCacheInfo(**{f.name: data.get(f.name, 0) for f in fields(PrefixCacheInfo)})


@dataclass
class Sample:
    """One sample, as slime's functions know it. R is `response_length`, T the number of tokens."""

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    """The execution: siblings share it."""
    prompt: str | list[dict[str, Any]] = ""
    tokens: list[int] = field(default_factory=list)
    """[T] Prompt, then response."""
    multimodal_inputs: dict[str, Any] | None = None
    multimodal_train_inputs: dict[str, Any] | None = None
    multimodal_train_input_id: str | None = None
    apply_chat_template_kwargs: dict[str, Any] | None = None
    response: str = ""
    response_length: int = 0
    label: str | None = None
    reward: float | dict[str, Any] | None = None
    loss_mask: list[int] | None = None
    """[R] 1 for a sampled token; None: all of them were sampled."""
    weight_versions: list[str] = field(default_factory=list)
    """One for each engine call."""
    rollout_log_probs: list[float] | None = None
    """[R] 0.0 stands where nothing was sampled."""
    rollout_top_p_token_ids: list[int] | None = None
    rollout_top_p_token_offsets: list[int] | None = None
    rollout_routed_experts: Any = None
    rollout_indexer_topk: Any = None
    remove_sample: bool = False
    teacher_log_probs: list[float] | None = None
    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    generate_function_path: str | None = None
    custom_rm_path: str | None = None
    train_metadata: dict[str, Any] | None = None
    session_id: str | None = None
    non_generation_time: float = 0.0
    spec_info: SpecInfo = field(default_factory=SpecInfo)
    prefix_cache_info: PrefixCacheInfo = field(default_factory=PrefixCacheInfo)

    def to_dict(self) -> dict[str, Any]:
        """As a dictionary of plain values."""
        return {
            **vars(self),
            "status": self.status.value,
            "spec_info": self.spec_info.to_dict(),
            "prefix_cache_info": self.prefix_cache_info.to_dict(),
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Sample:
        """From `to_dict`; unknown entries become attributes."""
        known = {one.name for one in fields(Sample)}
        given = {
            **data,
            "status": Status(data.get("status", "pending")),
            "spec_info": SpecInfo.from_dict(data.get("spec_info", {})),
            "prefix_cache_info": PrefixCacheInfo.from_dict(data.get("prefix_cache_info", {})),
        }
        sample = Sample(**{key: value for key, value in given.items() if key in known})
        for key in given.keys() - known:
            setattr(sample, key, given[key])
        return sample

    def get_reward_value(self, args: Any = None) -> float:
        """The reward; of a dictionary, the entry `args.reward_key`."""
        key = str(getattr(args, "reward_key", None))
        reward = self.reward.get(key) if isinstance(self.reward, dict) else self.reward
        if reward is None:
            raise InvalidArgument(
                explain(
                    "reading a reward",
                    on=f"sample {self.index}",
                    expected="a number, or --reward-key for a dictionary",
                    found=self.reward,
                )
            )
        return float(reward)

    @property
    def effective_response_length(self) -> int:
        """Sampled tokens."""
        return self.response_length if self.loss_mask is None else sum(self.loss_mask)

    def append_response_tokens(
        self,
        args: Any = None,
        *,
        tokens: Sequence[int] | None = None,
        log_probs: Sequence[float] | None = None,
        trainable: bool = True,
        meta_info: Mapping[str, Any] | None = None,
        text: str | None = None,
        update_terminal_info: bool = True,
    ) -> None:
        """Add n tokens to the response, with what belongs to them.

        Sampled ones (`trainable`) come with [n] `log_probs`; others get mask 0 and the placeholder
        0.0. `meta_info` is the engine's. Raises ValueError where lengths differ.
        """
        new = [int(token) for token in (tokens if tokens is not None else ())]
        if log_probs is not None and len(log_probs) != len(new):
            raise ValueError(f"{len(log_probs)} log-probs for {len(new)} tokens")
        if new and trainable and log_probs is None:
            raise ValueError("tokens that were sampled come with their log-probs")
        if new and not trainable and log_probs is not None:
            raise ValueError("tokens that nobody sampled have no log-probs")
        if self.loss_mask is None:
            self.loss_mask = [1] * self.response_length
        if self.rollout_log_probs is None:
            self.rollout_log_probs = [0.0] * self.response_length
        self.tokens = [*self.tokens, *new]
        self.loss_mask = [*self.loss_mask, *[int(trainable)] * len(new)]
        given = [0.0] * len(new) if log_probs is None else [float(one) for one in log_probs]
        self.rollout_log_probs = [*self.rollout_log_probs, *given]
        self.response_length += len(new)
        self.response += text or ""
        if meta_info is not None:
            self.update_from_meta_info(args, meta_info, update_terminal_info)

    def update_from_meta_info(
        self, args: Any, meta_info: Mapping[str, Any], update_terminal_info: bool = True
    ) -> None:
        """Take counts, weight version and, if wanted, the status from an engine's `meta_info`."""
        if getattr(args, "sglang_speculative_algorithm", None):
            self.spec_info.add(meta_info)
        self.prefix_cache_info.add(meta_info)
        if meta_info.get("weight_version") is not None:
            self.weight_versions.append(str(meta_info["weight_version"]))
        reason = (meta_info.get("finish_reason") or {}).get("type")
        if update_terminal_info and reason in _BY_REASON:
            self.status = _BY_REASON[reason]


# By the names that slime's functions use. Within the class they would hide those of the module.
for _name, _class in (
    ("Status", Status),
    ("SpecInfo", SpecInfo),
    ("PrefixCacheInfo", PrefixCacheInfo),
):
    setattr(Sample, _name, _class)
