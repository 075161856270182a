"""One rank of `test_megatron.py`: a policy into Megatron, and back.

`python -m tests.integrations.megatron_rank POLICY OUT`, with the environment of a rank.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from tests.integrations import megatron_on_cpu

OFF = (
    *("bf16", "gradient_accumulation_fusion", "bias_activation_fusion", "bias_dropout_fusion", "masked_softmax_fusion"),
    *("persist_layer_norm", "apply_rope_fusion", "cross_entropy_loss_fusion"),
)
"""What needs CUDA's kernels."""


def main() -> None:
    policy, out = sys.argv[1:]
    world = int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{out}.store", rank=int(os.environ["RANK"]), world_size=world)
    megatron_on_cpu.install()
    from megatron.bridge import AutoBridge
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    bridge = AutoBridge.from_hf_pretrained(policy)
    provider: Any = bridge.to_megatron_provider()
    provider.tensor_model_parallel_size = world
    provider.transformer_layer_spec = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
    provider.use_cpu_initialization, provider.params_dtype = True, torch.float32
    for name in OFF:
        setattr(provider, name, False)
    parallel_state.initialize_model_parallel(world)
    provider.finalize()
    made = provider.provide_distributed_model(wrap_with_ddp=False, use_cpu_initialization=True)
    model = [part.float() for part in made]
    alone = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    exported = dict(bridge.export_hf_weights(model, cpu=True, show_progress=False))
    own = dict(alone.named_parameters())
    different = [name for name in own if name not in exported or not torch.equal(exported[name].float(), own[name])]
    ids = torch.randint(4, 100, (1, 32), generator=torch.Generator().manual_seed(0))
    hidden = torch.triu(torch.ones(1, 1, 32, 32, dtype=torch.bool), 1)
    with torch.no_grad():
        part = model[0](ids, torch.arange(32)[None], hidden).contiguous()
        expected = alone(input_ids=ids).logits
    parts = [torch.empty_like(part) for _ in range(world)]
    dist.all_gather(parts, part)
    logits = torch.cat(parts, -1)[..., : expected.shape[-1]]
    found = {
        "parameters": sum(p.numel() for p in model[0].parameters()),
        "different": different,
        "logits": float((logits - expected).abs().max()),
        "largest": float(expected.abs().max()),
    }
    Path(f"{out}-{dist.get_rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # Megatron's groups are not taken apart
