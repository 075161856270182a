"""Arguments of three of SkyRL's example scripts, without the variables of the shell."""

from __future__ import annotations

COMMON = """
trainer.algorithm.advantage_estimator=grpo
trainer.strategy=fsdp
generator.inference_engine.tensor_parallel_size=1
trainer.eval_batch_size=1024
trainer.update_epochs_per_batch=1
trainer.max_prompt_length=512
generator.sampling_params.max_generate_length=1024
trainer.policy.optimizer_config.lr=1.0e-6
trainer.algorithm.use_kl_loss=true
generator.inference_engine.backend=vllm
generator.inference_engine.run_engines_locally=true
generator.inference_engine.weight_sync_backend=nccl
generator.n_samples_per_prompt=5
generator.inference_engine.gpu_memory_utilization=0.8
"""

SYNCHRONOUS = """
trainer.placement.colocate_all=true
trainer.eval_before_train=true
trainer.eval_interval=5
trainer.resume_mode=null
"""

SCRIPTS = {
    "gsm8k/run_gsm8k.sh": f"""{COMMON}{SYNCHRONOUS}
trainer.train_batch_size=1024
trainer.policy_mini_batch_size=256
trainer.micro_forward_batch_size_per_gpu=64
trainer.micro_train_batch_size_per_gpu=64
trainer.ckpt_interval=10
generator.batched=true
environment.env_class=gsm8k
""",
    "turn_level_rewards/run_gsm8k_multi_turn.sh": f"""{COMMON}{SYNCHRONOUS}
trainer.train_batch_size=256
trainer.policy_mini_batch_size=128
trainer.micro_forward_batch_size_per_gpu=32
trainer.micro_train_batch_size_per_gpu=32
trainer.ckpt_interval=-1
generator.batched=false
environment.env_class=gsm8k_multi_turn
""",
    "fully_async/fully_async_run_gsm8k.sh": f"""{COMMON}
trainer.fully_async.enabled=true
trainer.fully_async.max_staleness_steps=4
trainer.fully_async.num_parallel_generation_workers=1280
trainer.algorithm.policy_loss_type=rollout_is
trainer.algorithm.off_policy_correction.sequence_mask_metric=geometric
trainer.algorithm.off_policy_correction.geo_mask_high=1.01
trainer.algorithm.off_policy_correction.geo_mask_low=0.99
trainer.placement.colocate_all=false
trainer.eval_before_train=false
trainer.eval_interval=4
trainer.resume_mode=latest
trainer.train_batch_size=256
trainer.policy_mini_batch_size=256
trainer.micro_forward_batch_size_per_gpu=8
trainer.micro_train_batch_size_per_gpu=8
trainer.ckpt_interval=10
generator.batched=false
environment.env_class=gsm8k
""",
}
