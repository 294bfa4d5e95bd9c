"""Python's pinned tensors on Pinion's allocator: pinned_tensors.py LIBRARY DEVICE_TYPE."""

import ctypes
import json
import os
import sys
import types

import torch

MIB = 1 << 20

pinion = ctypes.CDLL(sys.argv[1])
install = pinion.pinion_install_torch_host_allocator
install.argtypes = [ctypes.c_char_p, ctypes.c_uint64, ctypes.c_double, ctypes.c_uint64]
pinion.pinion_last_error.restype = ctypes.c_char_p
pinion.pinion_torch_host_memory_stats.restype = ctypes.c_char_p

device_type = sys.argv[2]


def stat(name):
    return json.loads(pinion.pinion_torch_host_memory_stats(device_type.encode()))[name]


os.environ["PINION_LEDGER_DIRECTORY"] = "/no/such/directory"
assert install(device_type.encode(), 1024 * MIB, 100, 0) == -1
assert b"ledger_directory is /no/such/directory" in pinion.pinion_last_error()
del os.environ["PINION_LEDGER_DIRECTORY"]

# The limit is 1 GiB. The 100 percent ignore the RAM that other processes use.
assert install(device_type.encode(), 1024 * MIB, 100, 0) == 0, pinion.pinion_last_error()
assert pinion.pinion_last_error() == b""
assert stat("active_bytes.current") == 0

if device_type == "emu":
    # PyTorch's Python side needs this module of a device.
    emu = types.ModuleType("torch.emu")
    emu.is_available = lambda: True
    emu.current_device = lambda: 0
    torch._register_device_module("emu", emu)

tensor = torch.empty(3 * MIB, dtype=torch.uint8, pin_memory=True)
assert tensor.is_pinned()
assert stat("active_bytes.current") == 3 * MIB
assert stat("allocated_bytes.current") == 64 * MIB

source = torch.arange(MIB, dtype=torch.int32)
pinned = source.pin_memory()
assert pinned.is_pinned() and torch.equal(pinned, source)
assert stat("active_bytes.current") == 7 * MIB

on_device = pinned.to(device_type, non_blocking=True)
del pinned, tensor
assert stat("active_bytes.current") == 0  # the copy may be under way: the block waits for it
if device_type == "cuda":
    of_torch = torch.cuda.host_memory_stats()
    for name in ("active_bytes.current", "allocated_bytes.current", "host_alloc_time.count"):
        assert stat(name) == of_torch[name], (name, of_torch)
other = torch.full((MIB,), -1, dtype=torch.int32).pin_memory()
assert torch.equal(on_device.cpu(), source)

try:
    torch.empty(2048 * MIB, dtype=torch.uint8, pin_memory=True)
    raise AssertionError("there is no limit")
except torch.OutOfMemoryError as error:
    assert "max_locked_bytes" in str(error), error

# The workers are forked processes; a thread of this process pins their batches.
loader = torch.utils.data.DataLoader(range(64), batch_size=8, num_workers=2, pin_memory=True)
batches = list(loader)
assert all(batch.is_pinned() for batch in batches)
assert torch.equal(torch.cat(batches), torch.arange(64))

if device_type == "cuda":
    torch.cuda.reset_peak_host_memory_stats()
    stats = torch.cuda.host_memory_stats()
    assert stats["active_bytes.current"] >= 4 * MIB, stats
    assert stats["active_bytes.peak"] == stats["active_bytes.current"], stats

    # The graph reads pinned memory at each replay, although no tensor references it anymore.
    captured = torch.zeros(MIB, device="cuda")
    ones = torch.ones(MIB).pin_memory()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.copy_(ones, non_blocking=True)
    del ones
    twos = [torch.full((MIB,), 2.0).pin_memory() for _ in range(8)]
    graph.replay()
    assert captured.sum().item() == MIB

assert install(device_type.encode(), 0, 0, 0) == -1
assert "already" in pinion.pinion_last_error().decode()
print("passed")
