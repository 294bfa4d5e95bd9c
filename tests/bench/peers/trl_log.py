"""What TRL's own OffloadActivations does, event by event, for a few fixed models.

Usage: python3 trl_log.py TRL_FOLDER >testdata/trl_log.json

TRL_FOLDER has the files of the wheel (pip download --no-deps trl==1.16.0, and unzip it). The Python
is one that can import torch (tools/python_with_torch.sh prints one). No device and nothing else of
TRL is needed: its file is loaded unmodified, the modules that it imports are stubs, and the CPU
stands in for the accelerator, with streams, events, pinned memory and copies that only log.

trl_log_test.cc has the same models, and compares what bench/peers/trl_offload.h does with what is
logged here.
"""

import contextlib
import importlib.util
import json
import pathlib
import re
import sys
import types

import torch

log = []


class Stream:
    def __init__(self, name="comm"):
        self.name = name

    def record_event(self):
        log.append(f"{self.name} records")
        return f"record {sum('records' in line for line in log)}"

    def wait_event(self, event):
        log.append(f"{self.name} waits for {event}")

    def wait_stream(self, other):
        log.append(f"{self.name} waits for {other.name}")

    def synchronize(self):
        log.append(f"{self.name} synchronizes")


class Stash(dict):
    """Tells what is taken out of it, one by one or all at once."""

    def __init__(self, name):
        super().__init__()
        self.name = name

    def __delitem__(self, tensor_id):
        log.append(f"{self.name} drops {tensor_id}")
        super().__delitem__(tensor_id)

    def clear(self):
        log.extend(f"{self.name} drops {tensor_id}" for tensor_id in self)
        super().clear()


def stub(name, **attributes):
    sys.modules[name] = types.ModuleType(name)
    vars(sys.modules[name]).update(attributes)


def stand_in_for_the_accelerator():
    cpu = torch.device("cpu")
    compute = Stream("compute")
    torch.accelerator.current_accelerator = lambda: cpu
    torch.get_device_module = lambda device: types.SimpleNamespace(
        Stream=Stream,
        current_stream=lambda: compute,
        stream=lambda stream: contextlib.nullcontext(),
    )

    def pinned(allocate):
        def allocate_pinned(*args, pin_memory=False, **kwargs):
            return allocate(*args, **kwargs)

        return allocate_pinned

    torch.empty = pinned(torch.empty)
    torch.empty_like = pinned(torch.empty_like)
    copy = torch.Tensor.copy_
    to = torch.Tensor.to

    def copy_out(self, source, non_blocking=False):
        if non_blocking:
            log.append(f"out {source.nbytes}")
        return copy(self, source)

    def copy_in(self, *args, non_blocking=False, **kwargs):
        if not non_blocking:
            return to(self, *args, **kwargs)
        log.append(f"in {self.nbytes}")
        return self.clone()

    torch.Tensor.copy_ = copy_out
    torch.Tensor.to = copy_in
    torch.Tensor.record_stream = lambda self, stream: log.append(f"recorded on {stream.name}")


def load_trl(folder):
    stub("psutil", virtual_memory=lambda: types.SimpleNamespace(percent=0))
    stub("accelerate")
    stub("accelerate.logging", get_logger=lambda name: None)
    stub("accelerate.utils")
    stub("accelerate.utils.versions", is_torch_version=lambda *version: True)
    stub("transformers", is_torch_npu_available=lambda: False)
    path = pathlib.Path(folder) / "trl/models/activation_offloading.py"
    spec = importlib.util.spec_from_file_location("activation_offloading", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def offload_activations(trl, parameters, **options):
    """TRL's context, which logs."""
    context = trl.OffloadActivations(**options)
    context.update_model_params(types.SimpleNamespace(parameters=lambda: parameters))
    context.fwd_stash = Stash("forward stash")
    context.bwd_tensor_stash = Stash("backward stash")
    pack, unpack = context.pack_hook, context.unpack_hook

    def logging_pack(tensor):
        log.append(f"pack {context.tensor_id + 1}")
        return pack(tensor)

    def logging_unpack(tensor_id):
        log.append(f"unpack {tensor_id}")
        return unpack(tensor_id)

    context.pack_hook, context.unpack_hook = logging_pack, logging_unpack
    return context


class Probe(torch.autograd.Function):
    """A copy of the carrier, made by a node that saves what it is told to."""

    @staticmethod
    def forward(ctx, carrier, backward, *saved):
        ctx.save_for_backward(*saved)
        ctx.backward_of_model = backward
        ctx.saved_count = len(saved)
        return carrier.clone()

    @staticmethod
    def backward(ctx, grad):
        return (ctx.backward_of_model(grad, ctx), None) + (None,) * ctx.saved_count


def read(grad, ctx):
    ctx.saved_tensors
    return grad


def chain(trl, inside):
    """Layers whose outputs are saved twice: by what made them and by what reads them. Inside of the
    context are each "forward", each "step", or both "steps" together.
    """
    weights = [torch.nn.Parameter(torch.ones(16, 16)) for _ in range(8)]
    context = offload_activations(trl, weights)
    nothing = contextlib.nullcontext()
    with context if inside == "steps" else nothing:
        for _ in range(2):
            with context if inside == "step" else nothing:
                with context if inside == "forward" else nothing:
                    h = torch.ones(32, 16)
                    for weight in weights:
                        h = torch.tanh(torch.mm(h, weight))
                h.sum().backward()


def kinds(trl):
    """Sizes, parameters, repeated saves and views."""
    carrier = torch.nn.Parameter(torch.ones(16))
    weight = torch.nn.Parameter(torch.ones(32, 32))
    t = torch.ones(16, 32)
    u = torch.ones(32, 24)
    column = torch.ones(64, 1)
    saved = [
        torch.ones(1023, dtype=torch.uint8),
        torch.ones(1024, dtype=torch.uint8),
        weight,
        weight.t(),
        t,
        t,
        t[:, :16],
        t[4:],
        t.view(torch.int32),
        u.t(),
        column.expand(64, 32),
        torch.ones(0, 4),
        t,
        u,
        t[4:],
        column,
    ]
    with offload_activations(trl, [carrier, weight]):
        y = carrier
        for tensor in saved:
            y = Probe.apply(y, read, tensor)
        y.sum().backward()


def readers(trl):
    """What nodes do with what they have unpacked."""
    carrier = torch.nn.Parameter(torch.ones(16))
    context = offload_activations(trl, [carrier], min_offload_size=1, max_fwd_stash_size=2)
    kept = []

    def keep(grad, ctx):
        kept.extend(ctx.saved_tensors)
        return grad

    def view(grad, ctx):
        return ctx.saved_tensors[0][0]

    def ignore(grad, ctx):
        return grad

    for _ in range(2):
        t = [torch.ones(2, 16) for _ in range(8)]
        with context:
            y = Probe.apply(carrier, view, t[0])
            y = Probe.apply(y, read, t[1], t[2])
            y = Probe.apply(y, keep, t[3])
            y = Probe.apply(y, read, t[1])
            y = Probe.apply(y, ignore, t[4])
            y = Probe.apply(y, read, t[5])
            y = Probe.apply(y, view, t[6])
            Probe.apply(y, read, t[7])
            y.sum().backward()


def logged(model, *args):
    log.clear()
    model(*args)
    return list(log)


def main():
    folder = sys.argv[1]
    metadata = next(pathlib.Path(folder).glob("trl-*.dist-info/METADATA")).read_text()
    trl = load_trl(folder)
    stand_in_for_the_accelerator()
    logs = {
        "trl": re.search(r"^Version: (.*)$", metadata, re.MULTILINE)[1],
        "chain, each forward in a context": logged(chain, trl, "forward"),
        "chain, each step in a context": logged(chain, trl, "step"),
        "chain, both steps in one context": logged(chain, trl, "steps"),
        "kinds": logged(kinds, trl),
        "readers": logged(readers, trl),
    }
    json.dump(logs, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
