"""The trained module, as the engine serves it.

Invariants:
- the module given is never modified: the engine runs a second tree of modules over the same parameters, with its own
  train flag, attention implementation and buffers;
- a model is served only after a check that the engine's attention computes the same logits as the model's own.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from april.engines.device_memory import allocate, discard
from april.engines.embedded.attention import IMPLEMENTATION, Attention, LayerCall
from april.engines.embedded.kv_shape import KVShape
from april.engines.embedded.probe import LENGTHS, agrees, short_windows
from april.engines.kernels import attend, causal_mask
from april.engines.text_attention import set_text_attention
from april.images.model_inputs import ModelImages, Run
from april.images.store import ImageStore

NamedTensors = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]

_KNOWN_LAYERS = {"full_attention", "sliding_attention"}
_LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}


class ServedModel:
    """`model` over its own parameters, or over a copy of them in `dtype` where that differs.

    Args:
        images: images of prompts, if the model takes them.

    Raises:
        TypeError: `model` is not a Hugging Face model.
        ValueError: the engine does not support its architecture; the message names the reason.
    """

    def __init__(
        self, model: torch.nn.Module, dtype: torch.dtype | None = None, images: ImageStore | None = None
    ) -> None:
        if not isinstance(model, PreTrainedModel):
            raise TypeError(
                f"the embedded engine runs a Hugging Face causal language model, not {type(model).__name__}; of a "
                "wrapped model (PEFT, DDP) pass the model inside"
            )
        self.name = type(model).__name__
        self.config: Any = model.config.get_text_config()
        self._refuse_layers()
        parameter = next(model.parameters())
        self.device = parameter.device
        self.dtype = dtype or parameter.dtype
        self.shared = self.dtype == parameter.dtype
        self._source = model
        self.module: Any
        # deepcopy takes objects in `memo` as copied already, so the second tree shares the parameters.
        memo: dict[int, Any] = {id(p): p for p in model.parameters()} if self.shared else {}
        self.module = copy.deepcopy(model, memo)
        # A training library may have replaced `forward` by one that is bound to the model given.
        vars(self.module).pop("forward", None)
        self.module.eval()
        if not self.shared:
            convert(self.module, self.dtype)
            self.module.requires_grad_(False)
        self.images = None if images is None else ModelImages(self.module.base_model, images, keeps=True)
        self.vocabulary = int(self.module.get_input_embeddings().num_embeddings)
        self.shape = self._verify()
        # Apart from `_verify`: a model that fails this check is still served, in contexts no longer than its window.
        with short_windows(self.module):
            self._keeps_windows = self._agrees(_Probe())

    @torch.inference_mode()
    def logits(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        attention: Attention,
        rows: torch.Tensor | None = None,
        images: Sequence[Run] = (),
    ) -> torch.Tensor:
        """Return logits [rows, vocabulary] after `rows` of the packed tokens [1, tokens]; after all of them if None.

        Args:
            images: all tokens as runs, if any sequence has images.
        """
        if images:
            assert self.images is not None, "samples with images were refused"
            inputs = self.images.inputs(tokens, images)
            text = self.module.base_model.language_model
            hidden = text(**inputs, use_cache=False, april_attention=attention).last_hidden_state[0]
            found: torch.Tensor = self.module.get_output_embeddings()(hidden if rows is None else hidden[rows])
            return found
        output = self.module(
            input_ids=tokens,
            position_ids=positions,
            use_cache=False,
            logits_to_keep=0 if rows is None else rows,
            april_attention=attention,
        )
        logits: torch.Tensor = output.logits[0]
        return logits

    @torch.no_grad()
    def load(self, weights: NamedTensors | None) -> None:
        """Copy `weights` into the model.

        Args:
            weights: tensors, named as in the model's state dict; None if the parameters of the module given changed.

        Raises:
            KeyError: the model has no parameter of that name.
        """
        if self.images is not None:
            self.images.forget()
        if weights is None:
            if self.shared:
                return
            weights = self._source.named_parameters(remove_duplicate=False)
        # Duplicates stay: a tied parameter may be sent under any of its names.
        own = dict(self.module.named_parameters(remove_duplicate=False)) | dict(self.module.named_buffers())
        for name, tensor in weights.items() if isinstance(weights, Mapping) else weights:
            if name not in own:
                raise KeyError(f"{self.name} has no parameter named {name!r}")
            # A shared parameter is already up to date.
            if own[name].data_ptr() != tensor.data_ptr():
                own[name].copy_(tensor)

    def release(self) -> None:
        """Release the memory of parameters that the engine does not share; `allocate` and `load` have to follow."""
        if self.images is not None:
            self.images.forget()
        if not self.shared:
            discard(self.module.parameters())

    def allocate(self) -> None:
        """Allocate the memory that `release` has released; values are undefined until `load`."""
        if not self.shared:
            allocate(self.module.parameters())

    def longest_context(self) -> int:
        """Return the longest context for which the model's positions are defined."""
        longest = getattr(self.config, "max_position_embeddings", None)
        if longest is None:
            raise ValueError(f"{self.name} has no max_position_embeddings: pass context_length")
        return int(longest)

    def check_context(self, context_length: int) -> None:
        """Refuse a context in which the engine would treat positions or windows differently from the model."""
        rope = getattr(self.config, "rope_parameters", None) or {}
        # Models with several types of layers have one set of rotary parameters per type.
        kinds = rope.values() if all(isinstance(kind, Mapping) for kind in rope.values()) else (rope,)
        for kind in kinds:
            original = kind.get("original_max_position_embeddings") or self.longest_context()
            if kind.get("rope_type") in _LENGTH_DEPENDENT_ROPE and context_length > original:
                raise ValueError(
                    f"{self.name}: rotary embeddings of type {kind['rope_type']!r} change with the length of a batch "
                    f"beyond {original} tokens, which continuous batching cannot follow: pass context_length={original}"
                )
        sliding = getattr(self.config, "sliding_window", None)
        if sliding is not None and context_length > sliding and not self._keeps_windows:
            raise ValueError(
                f"{self.name} has a sliding window that it does not pass to its attention: pass "
                f"context_length={sliding}"
            )

    def _refuse_layers(self) -> None:
        for layer, kind in enumerate(getattr(self.config, "layer_types", None) or ()):
            if kind not in _KNOWN_LAYERS:
                raise ValueError(
                    f"{self.name}: layer {layer} is of type {kind!r}; the embedded engine supports "
                    f"{' and '.join(sorted(_KNOWN_LAYERS))}"
                )

    def _verify(self) -> KVShape:
        """Check that each layer calls the engine's attention once, and that it gives the logits of the model's own."""
        probe = _Probe()
        agrees = self._agrees(probe)
        layers = int(self.config.num_hidden_layers)
        # Specific causes first: each of them may also make the logits differ.
        if [call.layer for call in probe.calls] != list(range(layers)):
            raise ValueError(
                f"{self.name}: {layers} layers, of which {len(probe.calls)} called transformers' AttentionInterface; "
                "the embedded engine needs every layer to be attention and to call it once"
            )
        shapes = {(call.key.shape[1], call.key.shape[3], call.value.shape[3]) for call in probe.calls}
        if len(shapes) > 1:
            raise ValueError(f"{self.name}: layers with different KV heads or head sizes: {sorted(shapes)}")
        if not agrees:
            raise ValueError(
                f"{self.name}: logits differ from its own attention's: its layers compute attention or positions in a "
                "way that the embedded engine does not support"
            )
        return KVShape(layers, *shapes.pop())

    def _agrees(self, probe: _Probe) -> bool:
        """Whether the engine's attention gives the logits of the model's own."""

        def alone(ids: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self.module(input_ids=ids, use_cache=False).logits[0]
            return logits

        def packed(ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            set_text_attention(self.module, IMPLEMENTATION)
            try:
                return self.logits(ids, positions, probe)
            except (TypeError, KeyError, ValueError, RuntimeError, AttributeError) as error:
                raise ValueError(
                    f"{self.name} does not compute attention through transformers' AttentionInterface, as the "
                    f"embedded engine needs it: {error}"
                ) from error

        return agrees(self.module, alone, packed)


@torch.no_grad()
def convert(module: torch.nn.Module, dtype: torch.dtype) -> None:
    """Convert a model, or a module around one, in place, as loading it in `dtype` would.

    Parameters that transformers keeps in float32 are not converted, nor are buffers that are computed and not stored:
    rotary frequencies in bfloat16 give distant tokens wrong positions.
    """
    kept: set[str] = set()
    for model in module.modules():
        if isinstance(model, PreTrainedModel):
            # As in from_pretrained: the strict list applies to both half precisions, the other one to float16 only.
            kept |= set(model._keep_in_fp32_modules_strict or ())
            kept |= set(model._keep_in_fp32_modules or ()) if dtype == torch.float16 else set()
    for name, tensor in module.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and not any(part in name for part in kept):
            tensor.data = tensor.data.to(dtype)


class _Probe:
    """Plain causal attention within each of the probe's sequences that records its calls."""

    def __init__(self) -> None:
        self.calls: list[LayerCall] = []

    def attend(self, call: LayerCall) -> torch.Tensor:
        self.calls.append(call)
        parts = []
        for query, key, value in zip(*(t.split(LENGTHS, 2) for t in (call.query, call.key, call.value)), strict=True):
            positions = torch.arange(query.shape[2], device=query.device)[None]
            mask = causal_mask(positions, query.shape[2], call.window, query.dtype)
            parts.append(attend(query, key, value, mask, call.scaling, call.softcap))
        return torch.cat(parts, 2).transpose(1, 2).contiguous()
