"""Continuous batching in the process, over the Hugging Face module that is being trained.

- `engine`: the engine: submits samples, runs forward passes, hands out chunks;
- `batch_scheduler`: which sequences run, and the transitions between their states (`sequence`);
- `kv_cache`, `length_bucket`: rows of keys and values;
- `forward_pass`, `token_runs`, `bucket_attention`, `attention`: the computation of one pass;
- `sampling`, `uniforms`: drawing tokens;
- `model`, `probe`: the trained module as it is served, and the check that it is supported.
"""

from april.engines.embedded.engine import EmbeddedEngine

__all__ = ["EmbeddedEngine"]
