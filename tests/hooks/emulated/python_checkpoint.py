"""torch.utils.checkpoint inside an offload scope: python_checkpoint.py LIBRARY.

The checkpoint's own saved-tensor hooks are the inner ones and win: what it covers is computed again
and not offloaded, and what is around it is offloaded. Gradients have the same bytes four ways: on
the CPU, on emu, with offload, and with offload around checkpoints.
"""

import sys

import torch
from torch.utils.checkpoint import checkpoint

from op_table import CPU, EMU, Library, Way, host_copies

WIDTH = 64


def block(hidden, weight):
    return torch.tanh(torch.tanh(hidden @ weight) @ weight)


def gradients(way, checkpointed):
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(WIDTH, WIDTH, generator=generator).to(way.device).requires_grad_() for _ in range(3)]
    hidden = torch.randn(WIDTH, WIDTH, generator=generator).to(way.device)
    with way:
        for weight in weights:
            hidden = torch.tanh(hidden @ weight)
            hidden = checkpoint(block, hidden, weight, use_reentrant=False) if checkpointed else block(hidden, weight)
        loss = hidden.square().sum()
    del hidden
    loss.backward()
    return host_copies([weight.grad for weight in weights])


def main():
    library = Library(sys.argv[1])
    expected = gradients(Way("cpu", CPU), checkpointed=False)
    failures = []
    offloaded = {}
    for name, way, checkpointed in [
        ("emu", Way("emu", EMU), False),
        ("offload", Way("offload", EMU, library), False),
        ("offload around checkpoints", Way("offload", EMU, library), True),
    ]:
        before = library.counts()
        actual = gradients(way, checkpointed)
        offloaded[name], evicted_bytes, fetched_bytes = (a - b for a, b in zip(library.counts(), before))
        print(f"{name}: {offloaded[name]} saved tensors offloaded, {evicted_bytes} bytes evicted, {fetched_bytes} fetched")
        if not all(torch.equal(a, e) for a, e in zip(actual, expected)):
            failures.append(f"{name} has other gradients than the CPU")
        if way.library is not None and min(evicted_bytes, fetched_bytes) == 0:
            failures.append(f"{name} evicted or fetched nothing")
    if not offloaded["offload around checkpoints"] < offloaded["offload"]:
        failures.append("what the checkpoints cover was offloaded")
    for failure in failures:
        print("FAILED:", failure)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
