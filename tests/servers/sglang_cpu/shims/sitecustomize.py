"""Lets a CUDA-built torchvision import under a CPU torch, where its operators have nothing to attach to."""

import sys
import types

sys.modules["torchvision._meta_registrations"] = types.ModuleType("torchvision._meta_registrations")
