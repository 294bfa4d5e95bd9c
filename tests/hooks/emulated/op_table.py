"""LibTorch's own table of operators on "emu": op_table.py LIBRARY DTYPE [OPERATOR...].

Every operator of torch.testing's op_db that has a gradient for the dtype, its samples, forward,
backward and double backward, three ways: on the CPU, on emu, and on emu with every saved tensor
offloaded and evicted before backward (freed memory of emu reads as NaN). All three must give the
same bytes, but for the exceptions in op_table_exceptions.py, of which each must be needed.
OPERATORs are all that runs, by name.
"""

import ctypes
import gc
import os
import random
import sys
import time
import types
import warnings

import numpy
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves, tree_map

import op_table_exceptions

SAMPLES = 16  # of an operator, spread over those that the table has
CPU, EMU = "cpu", "emu:0"


class Library:
    """libop_table.so."""

    def __init__(self, path):
        self.functions = ctypes.CDLL(path)
        self.functions.op_table_sequence_number.restype = ctypes.c_uint64
        self.functions.op_table_raise_sequence_number.argtypes = [ctypes.c_uint64]
        self.functions.op_table_raise_sequence_number.restype = None
        self.functions.op_table_seed.argtypes = [ctypes.c_uint64]
        for name in "op_table_set_target", "op_table_limit":
            getattr(self.functions, name).argtypes = [ctypes.c_uint64]
            getattr(self.functions, name).restype = None
        for name in "op_table_take_peak", "op_table_steps_over_target":
            getattr(self.functions, name).restype = ctypes.c_uint64
        self.functions.op_table_register()
        emu = types.ModuleType("torch.emu")  # what Python wants of a device beyond its C++ side
        emu.is_available = lambda: True
        emu.current_device = lambda: 0
        emu.device_count = lambda: 1
        emu._is_in_bad_fork = lambda: False
        emu.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
        emu.manual_seed_all = self.functions.op_table_seed
        torch._register_device_module("emu", emu)

    def counts(self):
        """Saved tensors offloaded, bytes evicted, bytes fetched, so far."""
        counts = [ctypes.c_uint64() for _ in range(3)]
        self.functions.op_table_counts(*map(ctypes.byref, counts))
        return [count.value for count in counts]


class Way:
    """One of the three: a device, with offload or without."""

    def __init__(self, name, device, library=None):
        self.name, self.device, self.library = name, device, library

    def __enter__(self):
        if self.library is not None:
            self.library.functions.op_table_open_scope()

    def __exit__(self, *_):
        if self.library is not None:
            self.library.functions.op_table_close_scope()


def host_copies(tensors):
    torch.accelerator.current_stream(EMU).synchronize()  # copies to the host may be asynchronous
    return [t if t is None else t.detach().to(CPU, copy=True).resolve_conj().resolve_neg() for t in tensors]


def differentiable(tensors):
    return [t for t in tensors if t is not None and t.requires_grad]


def seeds_for(tensors, first):
    seeds = []
    for i, tensor in enumerate(tensors):
        generator = torch.Generator().manual_seed(first + i)
        seed = torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(tensor.dtype)
        seeds.append(seed.to(tensor.device).requires_grad_())
    return seeds


def run(op, sample, way, functions, results):
    """Appends to results what the forward, the backward and the double backward gave."""
    functions.op_table_seed(1)
    leaves = []

    def place(value):
        if not isinstance(value, torch.Tensor):
            return torch.device(way.device) if isinstance(value, torch.device) else value
        placed = value.detach().to(way.device, copy=True)
        if not value.requires_grad:
            return placed
        leaves.append(placed.requires_grad_())
        return placed.clone()  # not a leaf: those count as parameters and stay on the device

    with way:
        arguments = tree_map(place, (sample.input, sample.args, sample.kwargs))
        out = sample.output_process_fn_grad(op(arguments[0], *arguments[1], **arguments[2]))
        outputs = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        roots = [t.clone() for t in differentiable(outputs)]
    results.append(host_copies(outputs))
    del arguments, out, outputs  # what is saved is the graph's alone now
    if not roots or not leaves:
        return
    # Autograd runs nodes with higher numbers first, which decides the order of sums. Numbers are
    # per thread, and emu's backward thread continues where forward stopped.
    if way.device != CPU:
        number = functions.op_table_sequence_number()
        for root in roots:
            root.register_hook(lambda _: functions.op_table_raise_sequence_number(number))
    seeds = seeds_for(roots, first=10)
    second = op.supports_gradgrad
    grads = torch.autograd.grad(roots, leaves, seeds, create_graph=second, allow_unused=True)
    results.append(host_copies(grads))
    grads = differentiable(grads)
    if not second or not grads:
        return
    del roots
    again = torch.autograd.grad(grads, leaves + seeds, seeds_for(grads, first=20), allow_unused=True)
    results.append(host_copies(again))


def outcome(op, sample, way, functions):
    """What the stages gave, and the error that ended them."""
    results, error = [], None
    try:
        run(op, sample, way, functions, results)
    except Exception as raised:  # the table has samples that raise
        error = raised
        error.__traceback__ = None
    return results, error


def bytes_of(tensor):
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    return torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.flatten()).view(torch.uint8)


def same_bytes(a, b):
    if a is None or b is None:
        return a is b
    if a.dtype != b.dtype or a.shape != b.shape or a.layout != b.layout:
        return False
    return torch.equal(bytes_of(a), bytes_of(b))


def distance(a, b):
    comparable = a is not None and b is not None and a.shape == b.shape and a.layout == b.layout
    if not comparable or same_bytes(a, b):
        return 0.0
    return float((a.to_dense().to(torch.complex128) - b.to_dense().to(torch.complex128)).abs().max())


STAGES = ["forward", "backward", "double backward"]


def difference(got, expected):
    """In a few words, or None."""
    for stage, (a, b) in enumerate(zip(got[0], expected[0])):
        if len(a) != len(b) or not all(map(same_bytes, a, b)):
            return f"{STAGES[stage]} differs by up to {max(map(distance, a, b), default='?')}"
    if len(got[0]) == len(expected[0]) and (got[1] is None) == (expected[1] is None):
        return None
    stages, error = min(got, expected, key=lambda way: (len(way[0]), way[1] is None))
    return f"{STAGES[len(stages)]} raises: {str(error).splitlines()[0][:200]}"


def samples_of(op, dtype):
    for seed in (torch.manual_seed, random.seed, numpy.random.seed):
        seed(0)
    samples = list(op.sample_inputs(CPU, dtype, requires_grad=True))
    step = max(1, len(samples) / SAMPLES)
    return [samples[int(i * step)] for i in range(min(SAMPLES, len(samples)))]


def check(op, dtype, ways, functions):
    """The kind of the first difference and a sentence about it; (None, None) without one."""
    ran = False
    for sample in samples_of(op, dtype):
        cpu, emu, offloaded = (outcome(op, sample, way, functions) for way in ways)
        ran = ran or len(cpu[0]) > 0
        for got, expected, kind in (offloaded, emu, "offload"), (emu, cpu, "bits"):
            text = difference(got, expected)
            if text is None:
                continue
            for way, first in (ways[0], cpu), (ways[1], emu):
                if difference(outcome(op, sample, way, functions), first) is not None:
                    return "unrepeatable", text
            return "refused" if " raises: " in text and kind == "bits" else kind, text
    return (None, None) if ran else ("untested", "every sample raises on the CPU")


def main():
    path, dtype_name, *only = sys.argv[1:]
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.backends.mkldnn.set_flags(os.environ.get("PINION_TEST_ONEDNN") != "off")
    library = Library(path)
    dtype = getattr(torch, dtype_name)
    ways = Way("CPU", CPU), Way("emu", EMU), Way("emu, offloaded", EMU, library)
    operators = [op for op in op_db
                 if op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
                 and (not only or op.full_name in only)]
    failures, began, offloaded_operators = [], time.monotonic(), 0
    for i, op in enumerate(operators):
        before = library.counts()
        kind, text = check(op, dtype, ways, library.functions)
        offloaded_operators += library.counts() != before
        expected = op_table_exceptions.kind_of(op.full_name, dtype_name)
        name = f"{op.full_name}, {dtype_name}"
        # Unrepeatable results may agree by chance.
        if kind != expected and not (expected == "unrepeatable" and kind in (None, "offload", "bits")):
            failures.append(f"{name}: {kind or 'nothing'} instead of {expected or 'nothing'}: {text}")
        print(f"[{time.monotonic() - began:6.1f} s] {i + 1}/{len(operators)} {name}"
              f"{'' if kind is None else f': {kind}: {text}'}", flush=True)
    gc.collect()
    offloaded, evicted_bytes, fetched_bytes = library.counts()
    print(f"{len(operators)} operators, {offloaded_operators} of which offloaded {offloaded} saved "
          f"tensors in all; {evicted_bytes} bytes evicted, {fetched_bytes} fetched")
    if min(evicted_bytes, fetched_bytes) == 0:
        failures.append("nothing was evicted or fetched")
    if not only and offloaded_operators < len(operators) / 2:
        failures.append("most operators offloaded nothing")
    for failure in failures:
        print("FAILED:", failure)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
