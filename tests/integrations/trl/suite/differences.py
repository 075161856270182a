"""Tests of TRL's suite that april does not pass, each with its reason. A name without parameters covers all of them."""

from __future__ import annotations

TRAIN = "TestGRPOTrainer::test_train[trl-internal-testing/tiny-{}]"
VLM = "TestGRPOTrainerVLM::test_train_vlm[trl-internal-testing/tiny-{}]"

REFUSED: dict[str, str] = {
    TRAIN.format("GptOssForCausalLM"): "GptOssForCausalLM does not compute attention through transformers'",
    TRAIN.format("NemotronHForCausalLM-nano"): "NemotronHForCausalLM: layer 0 is of type 'linear_attention'",
    "TestGRPOTrainer::test_train_moe_peft_model": "GptOssForCausalLM does not compute attention through transformers'",
    "TestGRPOTrainer::test_liger_kernel_with_peft_prompt_learning_raises": "adapter 'default' (PROMPT_TUNING) is more",
    "TestGRPOTrainer::test_liger_kernel_with_peft_modules_to_save_lm_head_allowed": "adapter 'default' (LORA) is more",
    VLM.format("Qwen2VLForConditionalGeneration"): "april trains qwen2_5_vl, qwen3_vl with images",
    "TestGRPOTrainer::test_train_with_additional_generation_kwargs": "repetition_penalty = 1.1",
    "TestGRPOTrainer::test_train_with_generation_kwargs": "generation_kwargs: num_beams = 2",
}
"""Tests that run, and must end with april's refusal: a part of its line."""

ALL_ROWS = ["TestGRPOTrainer::test_prepare_input_called_with_correct_data"]
"""Tests that name more rows of the data set than `ROWS`."""
ROWS = 4

FIXED: dict[str, tuple[int, int]] = {
    "TestGRPOTrainer::test_train_with_mask_truncated_completions": (3, 3),
    "TestGRPOTrainer::test_train_with_tools": (3, 3),
    "TestGRPOTrainer::test_train_with_multiple_environments": (4, 2),
    "TestGRPOTrainer::test_train_with_environment_factory": (3, 3),
    "TestGRPOTrainer::test_train_with_environment_owned_reward": (3, 3),
    "TestGRPOTrainer::test_train_with_environment_owned_data": (3, 3),
    "TestGRPOTrainer::test_train_with_malformed_tool_calls": (3, 3),
}
"""Tests that replace `model.generate` by fixed tokens, with the rows of a batch and of a prompt (`fixed_tokens.py`)."""

FAMILY = "april trains qwen2_5_vl, qwen3_vl with images"
VLLM = "use_vllm = True: TRL's vLLM gets no images from april"

NOT_RUN: dict[str, str] = {
    VLM.format("Gemma3ForConditionalGeneration"): FAMILY,
    VLM.format("Gemma4ForConditionalGeneration"): FAMILY,
    VLM.format("LlavaNextForConditionalGeneration"): FAMILY,
    VLM.format("Qwen3_5ForConditionalGeneration-NoThink"): FAMILY,
    VLM.format("Qwen3_5MoeForConditionalGeneration-3.6"): FAMILY,
    "TestGRPOTrainerVLM::test_train_vlm_with_pad_to_multiple_of": FAMILY,
    "TestGRPOTrainerVLM::test_train_vlm_log_multimodal_false": FAMILY,
    "TestGRPOTrainerVLM::test_train_with_tools_multimodal_response": FAMILY,
    "TestGRPOTrainerSlow::test_vlm_training": FAMILY,
    "TestGRPOTrainerSlow::test_vlm_processor_vllm_colocate_mode": VLLM,
}
"""Tests, and classes of tests, that are skipped."""
