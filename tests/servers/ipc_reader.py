"""Reads a bucket with a server's own classes, in the server's environment; device memory is played by files.

python ipc_reader.py vllm|sglang BODY.json OUT.safetensors UUID
"""

import json
import sys
from types import SimpleNamespace

import torch
from safetensors.torch import save_file
from torch.multiprocessing import reductions

kind, body_path, out, uuid = sys.argv[1:]
OWN_NUMBER = 0


def rebuild(*arguments):
    """Instead of torch's `rebuild_cuda_tensor`: the handle names a file."""
    assert arguments[6] == OWN_NUMBER, f"the device is {arguments[6]}, a number of the trainer's"
    assert len(arguments) == 15
    with open(arguments[7].decode(), "rb") as file:
        return torch.frombuffer(bytearray(file.read()), dtype=arguments[5]).as_strided(arguments[1], arguments[2])


torch.cuda.get_device_properties = lambda device: SimpleNamespace(uuid=uuid)
torch.cuda.device_count = lambda: 1
with open(body_path) as file:
    body = json.load(file)
if kind == "vllm":
    reductions.rebuild_cuda_tensor = rebuild
    from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine, IPCWeightTransferUpdateInfo
    from vllm.distributed.weight_transfer.packed_tensor import PackedBufferImporter

    found = {}
    engine = object.__new__(IPCWeightTransferEngine)
    engine.packed, engine._packed_importer = False, PackedBufferImporter()
    engine.device, engine.model = torch.device("cuda", OWN_NUMBER), SimpleNamespace(load_weights=found.update)
    engine.init_transfer_engine(engine.init_info_cls(packed=True))
    for update in body:
        engine.receive_weights(IPCWeightTransferUpdateInfo(**update))
else:
    from sglang.srt.utils.common import MultiprocessingSerializer
    from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    monkey_patch_torch_reductions()
    reductions._rebuild_cuda_tensor_original = rebuild
    found = {}
    for entry in body:
        given = MultiprocessingSerializer.deserialize(entry)
        bucket = FlattenedTensorBucket(flattened_tensor=given["flattened_tensor"], metadata=given["metadata"])
        found.update(bucket.reconstruct_tensors())
save_file({name: tensor.clone() for name, tensor in found.items()}, out)
