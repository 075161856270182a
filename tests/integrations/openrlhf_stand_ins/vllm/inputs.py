"""See `vllm`."""

TokensPrompt = dict
