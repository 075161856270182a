"""Arguments of four of verl's example scripts, with the values that the scripts give them on GPUs."""

from __future__ import annotations

COMMON = """
algorithm.adv_estimator=grpo
algorithm.use_kl_in_reward=False
data.filter_overlong_prompts=True
data.truncation=error
actor_rollout_ref.model.path=Qwen/Qwen3-8B
actor_rollout_ref.model.use_remove_padding=True
actor_rollout_ref.model.enable_gradient_checkpointing=True
actor_rollout_ref.actor.use_dynamic_bsz=True
actor_rollout_ref.actor.entropy_coeff=0
actor_rollout_ref.rollout.name=vllm
actor_rollout_ref.rollout.tensor_model_parallel_size=2
actor_rollout_ref.rollout.gpu_memory_utilization=0.6
actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True
actor_rollout_ref.ref.log_prob_use_dynamic_bsz=True
actor_rollout_ref.ref.fsdp_config.param_offload=True
trainer.balance_batch=True
trainer.logger=["console","wandb"]
trainer.nnodes=1
trainer.save_freq=20
ray_kwargs.ray_init.runtime_env.py_executable=null
"""

KL_LOSS = """
actor_rollout_ref.actor.use_kl_loss=True
actor_rollout_ref.actor.kl_loss_coef=0.001
actor_rollout_ref.actor.kl_loss_type=low_var_kl
"""

SCRIPTS = {
    "grpo_trainer/run_qwen3_8b_fsdp.sh": f"""{COMMON}{KL_LOSS}
data.train_files=['$HOME/data/gsm8k/train.parquet','$HOME/data/math/train.parquet']
data.val_files=['$HOME/data/gsm8k/test.parquet','$HOME/data/math/test.parquet']
data.train_batch_size=1024
data.max_prompt_length=1024
data.max_response_length=2048
actor_rollout_ref.actor.optim.lr=1e-6
actor_rollout_ref.actor.ppo_mini_batch_size=256
actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24576
actor_rollout_ref.actor.fsdp_config.param_offload=False
actor_rollout_ref.actor.fsdp_config.optimizer_offload=False
actor_rollout_ref.rollout.n=5
actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=24576
actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=24576
trainer.project_name=verl_grpo_gsm8k_math
trainer.experiment_name=qwen3_8b_grpo_vllm_fsdp
trainer.n_gpus_per_node=8
trainer.test_freq=5
trainer.total_epochs=15
""",
    "grpo_trainer/run_qwen2_5_vl_7b_fsdp.sh": f"""{COMMON}{KL_LOSS}
actor_rollout_ref.model.path=Qwen/Qwen2.5-VL-7B-Instruct
data.train_files=$HOME/data/geo3k/train.parquet
data.val_files=$HOME/data/geo3k/test.parquet
data.image_key=images
data.train_batch_size=512
data.max_prompt_length=1024
data.max_response_length=2048
actor_rollout_ref.actor.strategy=fsdp2
actor_rollout_ref.actor.optim.lr=1e-6
actor_rollout_ref.actor.ppo_mini_batch_size=128
actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24576
actor_rollout_ref.actor.kl_loss_coef=0.01
actor_rollout_ref.actor.fsdp_config.param_offload=False
actor_rollout_ref.actor.fsdp_config.optimizer_offload=False
actor_rollout_ref.model.use_fused_kernels=True
actor_rollout_ref.rollout.n=5
actor_rollout_ref.rollout.multi_stage_wake_up=True
actor_rollout_ref.rollout.enable_chunked_prefill=False
actor_rollout_ref.rollout.enforce_eager=False
actor_rollout_ref.rollout.free_cache_engine=True
actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=24576
actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=24576
trainer.project_name=verl_grpo_geo3k
trainer.experiment_name=qwen2_5_vl_7b_vllm_fsdp
trainer.n_gpus_per_node=8
trainer.test_freq=5
trainer.total_epochs=15
""",
    "gspo_trainer/run_qwen3_8b_fsdp.sh": f"""{COMMON}
data.train_files=['$HOME/data/gsm8k/train.parquet','$HOME/data/math/train.parquet']
data.val_files=['$HOME/data/gsm8k/test.parquet','$HOME/data/math/test.parquet']
data.train_batch_size=512
data.max_prompt_length=2048
data.max_response_length=8192
actor_rollout_ref.actor.policy_loss.loss_mode=gspo
actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean
actor_rollout_ref.actor.clip_ratio_low=3e-4
actor_rollout_ref.actor.clip_ratio_high=4e-4
actor_rollout_ref.actor.clip_ratio_c=10.0
actor_rollout_ref.actor.optim.lr=1e-6
actor_rollout_ref.actor.ppo_mini_batch_size=128
actor_rollout_ref.actor.ppo_max_token_len_per_gpu=20480
actor_rollout_ref.actor.use_kl_loss=False
actor_rollout_ref.actor.fsdp_config.param_offload=True
actor_rollout_ref.actor.fsdp_config.optimizer_offload=True
actor_rollout_ref.rollout.n=16
actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=20480
actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=20480
trainer.critic_warmup=0
trainer.project_name=verl_gspo_gsm8k_math
trainer.experiment_name=qwen3_8b_vllm_fsdp
trainer.n_gpus_per_node=8
trainer.test_freq=10
trainer.total_epochs=10
""",
    "tuning/lora/run_qwen3_8b_fsdp.sh": f"""{COMMON}{KL_LOSS}
data.train_files=$HOME/data/gsm8k/train.parquet
data.val_files=$HOME/data/gsm8k/test.parquet
data.train_batch_size=64
data.max_prompt_length=512
data.max_response_length=1024
actor_rollout_ref.model.lora_rank=64
actor_rollout_ref.model.lora_alpha=32
actor_rollout_ref.actor.optim.lr=3e-6
actor_rollout_ref.actor.ppo_mini_batch_size=32
actor_rollout_ref.actor.ppo_max_token_len_per_gpu=12288
actor_rollout_ref.actor.fsdp_config.param_offload=False
actor_rollout_ref.actor.fsdp_config.optimizer_offload=False
actor_rollout_ref.rollout.n=5
actor_rollout_ref.rollout.load_format=safetensors
actor_rollout_ref.rollout.layered_summon=True
actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=12288
actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=12288
trainer.project_name=verl_grpo_lora_gsm8k
trainer.experiment_name=qwen3_8b_lora_vllm_fsdp
trainer.n_gpus_per_node=2
trainer.val_before_train=False
trainer.test_freq=5
trainer.total_epochs=15
""",
}
