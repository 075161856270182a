"""gcd_trl.py with active partial rollouts: two import lines and the argument partial_rollouts.

Run it from the repository: python examples/trl/gcd_april.py
"""

import reasoning_gym
from datasets import Dataset
from reasoning_gym.utils import extract_answer
from trl import GRPOConfig

from april.integrations.trl import GRPOTrainer, PartialRollouts

problems = reasoning_gym.create_dataset("gcd", size=5000, seed=0, min_value=1, max_value=150)
dataset = Dataset.from_list([{"prompt": p["question"], "answer": p["answer"]} for p in problems])


def correct(completions, answer, **kwargs):
    return [float(extract_answer(completion) == right) for completion, right in zip(completions, answer, strict=True)]


trainer = GRPOTrainer(
    model="examples/gcd/model",
    reward_funcs=correct,
    args=GRPOConfig(
        output_dir="runs/trl",
        model_init_kwargs={"dtype": "float32"},
        per_device_train_batch_size=32,
        gradient_accumulation_steps=8,  # 256 completions: 32 prompts, 8 completions each
        num_generations=8,
        max_completion_length=512,
        learning_rate=3e-4,
        max_steps=30,
        logging_steps=1,
        save_steps=10,
        use_cpu=True,
        bf16=False,
        report_to=[],
    ),
    train_dataset=dataset,
    partial_rollouts=PartialRollouts(over_sampling_batch_size=48, max_num_seqs=128, stream_interval=32),
)
trainer.train()
