"""libpinion_torch.so where there is no GPU: a clear error, and torch goes on as before."""

import ctypes
import sys

import torch

pinion = ctypes.CDLL(sys.argv[1])
install = pinion.pinion_install_torch_host_allocator
install.argtypes = [ctypes.c_char_p, ctypes.c_uint64, ctypes.c_double, ctypes.c_uint64]
pinion.pinion_last_error.restype = ctypes.c_char_p
pinion.pinion_torch_host_memory_stats.restype = ctypes.c_char_p

assert install(b"cuda", 0, 0, 0) == -1
error = pinion.pinion_last_error().decode()
assert "no CUDA device" in error and "driver" in error, error

assert pinion.pinion_torch_host_memory_stats(b"cuda") is None
assert "not installed for cuda" in pinion.pinion_last_error().decode()

assert install(b"warp_drive", 0, 0, 0) == -1
assert "warp_drive" in pinion.pinion_last_error().decode()

assert torch.arange(10).sum().item() == 45
try:
    torch.empty(16, pin_memory=True)
    raise AssertionError("pinned without a device")
except RuntimeError as error:
    assert "Pinion" not in str(error), error
print("passed")
