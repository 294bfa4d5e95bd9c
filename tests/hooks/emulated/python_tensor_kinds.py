"""Tensors that only Python has, saved in an offload scope: python_tensor_kinds.py LIBRARY PART.

wrappers: tensors whose storage is not their data (wrapper subclasses, fake tensors, functorch's,
functionalization's, sparse and jagged tensors), and make_fx, which makes some. They run in a scope as
they run without one.
compile: torch.compile that traces for the first time in a scope, with the gradients that it has without.
classes: tensors with Python's class, attributes and identity, which a node sees as with PyTorch's
own saved-tensor hooks that change nothing.
compiled_autograd: what compiled autograd says of what a scope has saved.
nested: what making a nested tensor of the strided layout says, where emu has none.
"""

import contextlib
import sys

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_map

from op_table import CPU, EMU, Library, Way

SIDE = 64


class Wrapper(torch.Tensor):
    """Has a tensor, and no memory of its own."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), named=None):
        inner = tree_map(lambda x: x.inner if isinstance(x, cls) else x, (arguments, named or {}))
        out = function(*inner[0], **inner[1])
        return tree_map(lambda x: cls(x) if isinstance(x, torch.Tensor) else x, out)


class Dispatching(Wrapper):
    """Has memory of its own as well, which nobody may take for its data."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_subclass(cls, torch.full_like(inner.detach(), float("nan")))


class Save(torch.autograd.Function):
    """Saves tensors, and notes what its backward sees of them."""

    @staticmethod
    def forward(ctx, x, note, *tensors):
        ctx.save_for_backward(*tensors)
        ctx.note = note
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.note(ctx.saved_tensors)
        return (grad, None) + (None,) * len(ctx.saved_tensors)


def values(first=0.0, device=EMU):
    return (torch.arange(SIDE * SIDE, dtype=torch.float32).reshape(SIDE, SIDE) / 1e3 + first).to(device)


def plain(tensor):
    while isinstance(tensor, Wrapper):
        tensor = tensor.inner
    return torch.cat([tensor.a, tensor.b]) if isinstance(tensor, TwoTensor) else tensor


# --- wrappers: each returns tensors that are the same in a scope as without


def wrapped(make, needs_grad, held):
    def case(scope):
        tensor = make(values())
        weight = make(values(2)) if needs_grad else values(2)
        weight.requires_grad_(needs_grad)
        seen = []
        with scope:
            if needs_grad:
                out = (weight.sin() * tensor * weight).sum()
            else:
                out = Save.apply(weight.requires_grad_(), lambda saved: seen.extend(map(plain, saved)), tensor).sum()
        if not held:
            del tensor
        out.backward()
        return [plain(weight.grad), *seen]

    return case


def fake(scope):
    with FakeTensorMode() as mode:
        weight = mode.from_tensor(values().requires_grad_())
        with scope:
            out = (weight.sin() * weight).exp()
        out.sum().backward()
    return [torch.tensor([weight.grad.shape], device=CPU)]


def functorch_grad(scope):
    with scope:
        return [torch.func.grad(lambda x: (x.sin() * x).sum())(values())]


def functorch_per_sample(scope):
    with scope:
        return [torch.func.vmap(torch.func.grad(lambda x: (x.sin() * x).sum()))(values())]


def functorch_jacobian(scope):
    x = values()[0, :8].clone()
    with scope:
        return [torch.func.jacrev(lambda x: x.sin() * x)(x), torch.func.hessian(lambda x: (x.sin() * x).sum())(x)]


def functionalized(scope):
    x = values().requires_grad_()

    def run(x):
        y = x.sin()
        y.mul_(2)
        return y * x

    with scope:
        out = torch.func.functionalize(run)(x)
    out.sum().backward()
    return [x.grad]


def traced(scope):
    def step(x):
        return torch.autograd.grad((x.sin() * x).sum(), x)[0]

    x = values().requires_grad_()
    with scope:
        graph = make_fx(step, tracing_mode="symbolic")(x)
    return [graph(x)]


def compiled(dynamic):
    def case(scope):
        torch._dynamo.reset()
        layer = torch.nn.Linear(SIDE, SIDE)
        with torch.no_grad():
            layer.weight.copy_(values(device=CPU) / SIDE)
            layer.bias.zero_()
        layer = layer.to(EMU)
        step = torch.compile(lambda x: torch.relu(layer(x)).sin() * x, backend="aot_eager", dynamic=dynamic)
        for _ in range(2):
            with scope:
                loss = step(values().requires_grad_()).sum()
            loss.backward()
        return [layer.weight.grad, layer.bias.grad]

    return case


def sparse(layout):
    def case(scope):
        matrix = torch.eye(SIDE).to_sparse(layout=layout)
        x = values(device=CPU).requires_grad_()
        with scope:
            out = torch.mm(matrix, x.sin())
        out.sum().backward()
        return [x.grad]

    return case


def jagged(scope):
    leaf = values(device=CPU).requires_grad_()
    with scope:
        nested = torch.nested.nested_tensor_from_jagged(leaf, offsets=torch.tensor([0, 10, SIDE]))
        out = (nested.sin() * nested).values().sum()
    out.backward()
    return [leaf.grad]


WRAPPERS = {
    **{
        f"{name}, {'with' if needs_grad else 'without'} a gradient, {'held' if held else 'let go of'}": wrapped(make, needs_grad, held)
        for name, make in [
            ("a wrapper", Wrapper),
            ("a tensor that dispatches", Dispatching),
            ("a pair", lambda x: TwoTensor(x, x.clone())),
            ("a wrapper of a wrapper", lambda x: Wrapper(Wrapper(x))),
        ]
        for needs_grad in (False, True)
        for held in (False, True)
    },
    "fake": fake,
    "functorch's grad": functorch_grad,
    "functorch's per-sample grad": functorch_per_sample,
    "functorch's jacobian": functorch_jacobian,
    "functionalize": functionalized,
    "make_fx": traced,
    "sparse COO": sparse(torch.sparse_coo),
    "sparse CSR": sparse(torch.sparse_csr),
    "jagged": jagged,
}


COMPILE = {"compile": compiled(dynamic=False), "compile for all shapes": compiled(dynamic=True)}


def run_same(cases, library):
    for name, case in cases.items():
        print(name, flush=True)
        expected = [t.detach().to(CPU) for t in case(contextlib.nullcontext())]
        try:
            actual = [t.detach().to(CPU) for t in case(Way("offload", EMU, library))]
        except Exception as error:
            yield f"{name}: {error}"
            continue
        if len(actual) != len(expected) or not all(map(torch.equal, actual, expected)):
            yield f"{name}: {actual}, without a scope {expected}"


# --- classes


class Named(torch.Tensor):
    pass


class NamedParameter(torch.nn.Parameter):
    pass


def as_named(tensor):
    named = tensor.as_subclass(Named)
    named.label = "a label"
    return named


CLASSES = {
    "a tensor": lambda x: x,
    "a subclass": as_named,
    "a view of a subclass": lambda x: as_named(x)[1:],
    "a parameter": torch.nn.Parameter,
    "a frozen parameter": lambda x: torch.nn.Parameter(x, requires_grad=False),
    "a frozen parameter's subclass": lambda x: NamedParameter(x, requires_grad=False),
    "a buffer": torch.nn.Buffer,
    "a subclass that needs a gradient": lambda x: as_named(x).requires_grad_(),
    "a subclass with a history": lambda x: as_named(x).requires_grad_().sin(),
    "a subclass that needs a gradient later": as_named,
}


def seen_of(name, device, held, again, scope):
    """Class, attribute and identity of what a node sees, time after time."""
    tensor = CLASSES[name](values(device=device))
    seen = []

    def note(saved):
        for one in saved:
            seen.append((type(one).__name__, getattr(one, "label", None) == "a label", tensor is one, plain_sum(one)))

    with scope:
        out = Save.apply(values(1, device).requires_grad_(), note, tensor, tensor)
        for first in range(4):  # so that it leaves the device
            out = Save.apply(out, lambda _: None, values(first, device))
    if name == "a subclass that needs a gradient later":
        tensor.requires_grad_()
    if not held:
        tensor = None
    for _ in range(2 if again else 1):
        out.sum().backward(retain_graph=again)
    return seen


def plain_sum(tensor):
    return tensor.detach().as_subclass(torch.Tensor).to(CPU).sum().item()


def run_classes(library):
    for name in CLASSES:
        for device, held, again in [(EMU, True, False), (EMU, True, True), (CPU, True, False), (CPU, False, False)]:
            case = f"{name} on {device}, {'held' if held else 'let go of'}{', twice' if again else ''}"
            print(case, flush=True)
            expected = seen_of(name, device, held, again, saved_tensors_hooks(lambda x: x, lambda x: x))
            actual = seen_of(name, device, held, again, Way("offload", EMU, library))
            if actual != expected:
                yield f"{case}: {actual}, with hooks that change nothing {expected}"
    # Offloading is for the memory; the fetched tensor has its bytes, but not its class.
    (actual, _) = seen_of("a subclass", EMU, False, False, Way("offload", EMU, library))
    if actual[:3] != ("Tensor", False, False):
        yield f"a subclass that was offloaded comes back as {actual}"


# --- compiled autograd


def run_compiled_autograd(library):
    weight = values().requires_grad_()
    with Way("offload", EMU, library):
        loss = (weight.sin() * weight).sum()
    message = "nothing"
    try:
        with torch._dynamo.compiled_autograd._enable(lambda graph: graph):
            loss.backward()
    except RuntimeError as error:
        message = str(error)
    if "Compiled Autograd only supports python saved tensor hooks" not in message:
        yield f"compiled autograd says {message}"


# --- nested


def run_nested(library):
    for name, make in [
        ("as_nested_tensor", torch.nested.as_nested_tensor),
        ("nested_tensor", torch.nested.nested_tensor),
    ]:
        for needs_grad in (False, True):
            message = "nothing"
            try:
                make([values().requires_grad_(needs_grad), values()[1:]], layout=torch.strided)
            except RuntimeError as error:
                message = str(error)
            if "aten::" not in message or "emu has dense tensors only" not in message:
                yield f"{name}, {'with' if needs_grad else 'without'} a gradient, says {message}"


PARTS = {
    "wrappers": lambda library: run_same(WRAPPERS, library),
    "compile": lambda library: run_same(COMPILE, library),
    "classes": run_classes,
    "compiled_autograd": run_compiled_autograd,
    "nested": run_nested,
}


def main():
    library = Library(sys.argv[1])
    failures = list(PARTS[sys.argv[2]](library))
    for failure in failures:
        print("FAILED:", failure)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
