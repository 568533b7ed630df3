"""Options of rewards. Names are those of slime."""

from __future__ import annotations

from trainer.options.option import Option, place
from trainer.ranges import above

__all__ = ["OPTIONS"]

OPTIONS: tuple[Option, ...] = (
    Option(
        "rm_type",
        "data",
        str,
        None,
        "reward by type: 'math' (math-verify), 'boxed_math' (what stands in the last \\boxed), "
        "'f1', 'boxed_f1', 'remote_rm', 'exact_line', 'reasoning_gym:<dataset>'; default: the "
        "task's own",
    ),
    Option(
        "custom_rm_path",
        "data",
        str,
        None,
        "reward function 'package.module:function' in place of the task's own: f(sample), or "
        "slime's async f(args, sample)",
    ),
    Option(
        "group_rm",
        "data",
        bool,
        False,
        "--custom-rm-path gets all samples of a group at once, and returns a list",
    ),
    Option(
        "reward_key",
        "data",
        str,
        None,
        "entry of what --custom-rm-path returns that is the reward; the others are its parts",
    ),
    Option("eval_reward_key", "data", str, None, "the same for evaluations"),
    place("rm_url", "data", str, None, "address of the reward server of --rm-type remote_rm"),
    place(
        "rm_timeout",
        "data",
        float,
        10.0,
        "seconds that a verifier, or one try at a reward server, has for a sample: later the "
        "sample failed",
        within=above(0),
    ),
)
