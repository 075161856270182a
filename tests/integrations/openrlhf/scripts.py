"""Flags of three of OpenRLHF's example scripts, without the variables of the shell.

OpenRLHF 0.11.2 itself does not accept two flags of the scripts any longer (`--algo.advantage.is_correction_enable` and
`is_correction_type`). They are left out here; the flags of april's page contain their successor.
"""

from __future__ import annotations

AGENT = """
--actor.model_name_or_path Qwen/Qwen3-4B-Thinking-2507
--ckpt.load_enable
--ckpt.output_dir exp/Qwen3-4B-Thinking
--ckpt.path exp/Qwen3-4B-Thinking/ckpt
--ckpt.save_hf
--ckpt.max_num 3
--ckpt.save_steps 10
--train.agent_func_path examples/python/agent_func.py
--data.prompt_dataset zhuzilin/dapo-math-17k
--data.input_key prompt
--data.label_key label
--data.max_len 74240
--rollout.max_new_tokens 64000
--data.apply_chat_template
--ds.packing_samples
--rollout.batch_size 128
--rollout.n_samples_per_prompt 8
--train.batch_size 1024
--algo.dynamic_filtering_enable
--algo.dynamic_filtering_range 0.0 1.0
--train.dynamic_batch_enable
--train.max_tokens_per_gpu 16192
--rollout.max_tokens_per_gpu 32768
--train.micro_batch_size 1
--rollout.micro_batch_size 8
--data.max_samples 128000
--train.max_epochs 1
--train.num_episodes 1
--ref.num_nodes 1
--ref.num_gpus_per_node 4
--actor.num_nodes 1
--actor.num_gpus_per_node 4
--vllm.num_engines 2
--vllm.tensor_parallel_size 2
--train.colocate_all
--ds.enable_sleep
--vllm.sync_backend nccl
--vllm.enforce_eager
--ds.zero_stage 3
--actor.gradient_checkpointing_enable
--ds.ring_attn_size 2
--ds.ring_attn_head_stride 2
--ds.param_dtype bf16
--algo.advantage.estimator reinforce_baseline
--actor.adam.lr 5e-7
--actor.entropy_coef 0.0
--algo.kl.init_coef 1e-5
--algo.kl.use_loss
--algo.kl.estimator k2
--logger.tensorboard_dir exp/Qwen3-4B-Thinking/runs
--logger.logging_steps 1
--eval.steps -1
"""

SCRIPTS = {
    "train_dapo_ray_hybrid_engine.sh": """
--ref.num_nodes 1
--ref.num_gpus_per_node 8
--actor.num_nodes 1
--actor.num_gpus_per_node 8
--vllm.num_engines 4
--vllm.tensor_parallel_size 2
--train.colocate_all
--vllm.gpu_memory_utilization 0.6
--algo.kl.init_coef 1e-3
--algo.advantage.gamma 1.0
--algo.kl.use_loss
--algo.kl.estimator k3
--algo.advantage.estimator group_norm
--algo.dynamic_filtering_enable
--algo.dynamic_filtering_range 0 1
--actor.eps_clip_low_high 0.2 0.27
--actor.model_name_or_path OpenRLHF/Llama-3-8b-sft-mixture
--reward.remote_url /openrlhf/examples/python/reward_func.py
--ckpt.output_dir /openrlhf/examples/test_scripts/final/llama3-8b-rlhf
--ckpt.path /openrlhf/examples/test_scripts/ckpt/llama3-8b-rlhf
--ckpt.save_steps 20
--ckpt.save_hf
--train.micro_batch_size 8
--train.batch_size 128
--rollout.micro_batch_size 16
--rollout.batch_size 128
--rollout.n_samples_per_prompt 8
--train.max_epochs 1
--data.max_len 2048
--data.max_samples 20000
--ds.zero_stage 3
--ds.param_dtype bf16
--actor.adam.lr 5e-7
--data.prompt_dataset OpenRLHF/prompt-collection-v0.1
--data.input_key context_messages
--data.apply_chat_template
--actor.gradient_checkpointing_enable
--ds.packing_samples
--vllm.sync_backend nccl
--vllm.enforce_eager
--vllm.enable_sleep
--ds.enable_sleep
""",
    "train_reinforce_baseline_hybrid_engine.sh": f"{AGENT} --vllm.gpu_memory_utilization 0.7",
    "train_reinforce_baseline_ray_agent_async.sh": f"""{AGENT}
--train.async_enable
--train.partial_rollout_enable
--vllm.gpu_memory_utilization 0.95
""",
}
