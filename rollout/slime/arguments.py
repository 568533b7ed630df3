"""slime's `args`, as custom functions read them: the values of this run under slime's names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ledger.errors import InvalidArgument, explain

__all__ = ["SlimeArguments", "slime_arguments"]

_AS_SLIME: Mapping[str, Any] = {
    "ci_test": False,
    "multimodal_keys": None,
    "rollout_global_dataset": True,
    "rollout_skip_special_tokens": False,
    "rollout_stop": None,
    "rollout_stop_token_ids": None,
    "router_policy": "consistent_hashing",
    "sglang_enable_deterministic_inference": True,
    "sglang_speculative_algorithm": None,
    "sglang_server_concurrency": 512,
    "sglang_dp_size": 1,
    "sglang_model_routers": None,
    "use_rollout_routing_replay": False,
    "partial_rollout": False,
    "mask_offpolicy_in_partial_rollout": False,
    "reward_key": None,
    "eval_reward_key": None,
    "group_rm": False,
}
"""What slime's functions ask for, where no option of this run says otherwise.

Requests name their session by a header (`router_policy`), and every request is given a seed of its
own.
"""


class SlimeArguments:
    """Names and values, to be read."""

    __slots__ = ("_values",)
    _values: dict[str, Any]

    def __init__(self, values: Mapping[str, Any]) -> None:
        """`values` by name; they cannot be changed afterwards."""
        object.__setattr__(self, "_values", dict(values))

    def __getattr__(self, name: str) -> Any:
        """Raises AttributeError, as `getattr(args, name, default)` wants it."""
        if name.startswith("_") or name not in self._values:
            raise AttributeError(
                explain(
                    "reading slime's args",
                    on=name,
                    expected="an option of this run, or one that slime's functions have here",
                    found="none of that name",
                    do="use getattr(args, name, default) where a value may be missing",
                )
            )
        return self._values[name]

    def __setattr__(self, name: str, value: Any) -> None:
        """Raises InvalidArgument: what a run was told is recorded, and does not change."""
        raise InvalidArgument(
            explain(
                "setting a value of slime's args",
                on=name,
                expected="that they are only read",
                found=repr(value),
            )
        )

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def __dir__(self) -> list[str]:
        return sorted(self._values)

    def __reduce__(self) -> Any:
        return SlimeArguments, (self._values,)

    def replaced(self, **values: Any) -> SlimeArguments:
        """A copy with other values."""
        return SlimeArguments({**self._values, **values})


def slime_arguments(values: Mapping[str, Any]) -> SlimeArguments:
    """The arguments of a run, of its options by name.

    `sglang_router_ip` and `sglang_router_port` are not there: whoever serves requests adds them.
    """
    given = {name: value for name, value in values.items() if value is not None}
    return SlimeArguments({**dict.fromkeys(values), **_AS_SLIME, **given})
