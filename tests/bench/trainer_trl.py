"""TRL's side: `python -m tests.bench.trainer_trl CASE MODEL FOLDER`; asked by lines on stdin.

GRPOTrainer with recorded completions handed in by its `rollout_func`, so that nothing is generated:
a step is what lies between its `on_step_begin` and `on_step_end`. Float32, no gradient
checkpointing, attention by torch's scaled_dot_product_attention (its default on a CPU).
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any

from tests.bench.trainer_case import Case, answer, commands, peak_bytes


def main() -> None:
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    warnings.simplefilter("ignore")
    case, model_dir, folder = Case(**json.loads(sys.argv[1])), sys.argv[2], sys.argv[3]
    import torch

    torch.set_num_threads(case.threads)
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    prompts = [tokens.tolist() for tokens in case.prompts()]
    responses = [tokens.tolist() for tokens in case.responses()]
    rewards = case.rewards()
    log_probs = [[-1.0] * len(tokens) for tokens in responses]

    def recorded(asked: list[str], trainer: Any) -> dict[str, Any]:
        return {
            "prompt_ids": [prompts[int(one)] for one in asked],
            "completion_ids": responses,
            "logprobs": log_probs,
        }

    def reward(completions: list[str], **_: Any) -> list[float]:
        return rewards

    class Asked(TrainerCallback):
        """Waits for the parent before each step, tells it afterwards."""

        def __init__(self, asked: Iterator[str]) -> None:
            self.asked, self.began, self.cpu = asked, 0.0, 0.0
            self.told: dict[str, float] = {}

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            for word in self.asked:
                if word == "score":
                    score()
                    continue
                self.began, self.cpu = time.perf_counter(), time.process_time()
                return
            control.should_training_stop = True
            os._exit(0)  # the parent is done; there is nothing to save

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.told = {
                "seconds": time.perf_counter() - self.began,
                "cpu_seconds": time.process_time() - self.cpu,
            }

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if logs and "grad_norm" in logs:
                answer(**self.told, grad_norm=float(logs["grad_norm"]), peak_bytes=peak_bytes())

    def score() -> None:
        """Old log-probs, as its _generate_and_score_completions takes them."""
        width, longest = case.prompt_length, max(map(len, responses))
        ids = torch.zeros(case.samples, width + longest, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, response in enumerate(responses):
            whole = prompts[row // case.n_samples_per_prompt] + response
            ids[row, : len(whole)], mask[row, : len(whole)] = torch.tensor(whole), 1
        began, cpu = time.perf_counter(), time.process_time()
        with torch.no_grad():
            trainer._get_per_token_logps_and_entropies(
                trainer.model, ids, mask, longest, batch_size=case.micro_batch_size
            )
        answer(seconds=time.perf_counter() - began, cpu_seconds=time.process_time() - cpu)

    config = GRPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=case.micro_batch_size,
        gradient_accumulation_steps=case.samples // case.micro_batch_size,
        num_generations=case.n_samples_per_prompt,
        max_completion_length=case.longest_response,
        learning_rate=case.lr,
        lr_scheduler_type="constant",
        adam_beta2=case.adam_beta2,
        weight_decay=0.0,
        max_grad_norm=1.0,
        beta=0.0,
        epsilon=0.2,
        loss_type="grpo",
        temperature=1.0,
        max_steps=1_000_000,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        shuffle_dataset=False,
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": [str(i) for i in range(len(prompts))]}),
        processing_class=AutoTokenizer.from_pretrained(model_dir),
        rollout_func=recorded,
        callbacks=[Asked(commands())],
    )
    answer(ready=1)
    trainer.train()


if __name__ == "__main__":
    main()
