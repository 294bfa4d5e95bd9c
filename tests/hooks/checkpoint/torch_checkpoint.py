"""What torch.utils.checkpoint does in a list of cases, as JSON: torch_checkpoint.py > torch_checkpoint.json.

The same cases are written in C++ in torch_checkpoint_test.cc, for pinion::checkpoint. A case leaves values (outputs, then
gradients of x, w0, w1 and w2), how often each of its parts ran, and the kind of error that it ended with.
"""

import json
import sys

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import checkpoint_sequential

SIDE = 4

ERRORS = {
    "different number of tensors": "number",
    "have different metadata": "metadata",
    "save more tensors": "more",
    "already unpacked once": "read twice",
    "modified by an inplace operation": "changed in place",
    "this part fails": "failed",
}


def checkpoint(function, *inputs, **options):
    return torch_checkpoint(function, *inputs, use_reentrant=False, **options)


class Case:
    def __init__(self, dtype):
        self.dtype = dtype
        self.x, self.w0, self.w1, self.w2 = (self.tensor(seed).requires_grad_() for seed in range(1, 5))
        self.values = []
        self.ran = {}

    def tensor(self, seed):
        return (((torch.arange(SIDE * SIDE) * 7 + seed * 5) % 11 - 5).to(self.dtype) / 8).view(SIDE, SIDE)

    def run(self, part):
        self.ran[part] = self.ran.get(part, 0) + 1
        return self.ran[part]

    # Saved tensors: x, w0, tanh's output, tanh's output again with w1, and the product.
    def segment(self, x):
        self.run("begin")
        y = torch.sin(torch.tanh(x @ self.w0) @ self.w1)
        self.run("end")
        return y

    def backward(self, y, **options):
        self.values.append(y)
        (y * y).sum().backward(**options)


CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


@case
def plain(c):
    c.backward(checkpoint(c.segment, c.x))


@case
def no_early_stop(c):
    c.backward(checkpoint(c.segment, c.x, early_stop=False))


@case
def one_after_the_other(c):
    c.backward(checkpoint(c.segment, torch.tanh(checkpoint(c.segment, c.x) @ c.w2)))


def outer(c, x, **options):
    c.run("outer")
    y = checkpoint(c.segment, torch.tanh(x @ c.w2), **options)
    c.run("outer end")
    return torch.cos(y @ c.w0)


@case
def nested(c):
    c.backward(checkpoint(lambda x: outer(c, x), c.x))


@case
def nested_no_early_stop(c):
    c.backward(checkpoint(lambda x: outer(c, x, early_stop=False), c.x, early_stop=False))


@case
def nested_three_deep(c):
    def outermost(x):
        c.run("outermost")
        return checkpoint(lambda x: outer(c, x), x @ c.w1).tanh()

    c.backward(checkpoint(outermost, c.x))


@case
def other_inputs(c):
    def scaled(x, scale, mask):
        c.run("begin")
        return torch.tanh(x @ c.w0).masked_fill(mask, 0.5) * scale

    c.backward(checkpoint(scaled, c.x, 0.75, c.tensor(3) > 0))


@case
def input_without_gradient(c):
    c.x.requires_grad_(False)
    c.backward(checkpoint(c.segment, c.x))


@case
def two_outputs_of_which_one_is_used(c):
    def two(x):
        c.run("begin")
        return torch.tanh(x @ c.w0), torch.sin(x @ c.w1)

    first, second = checkpoint(two, c.x)
    c.backward(first, retain_graph=True)
    c.backward(second)


def drops(c, **options):
    def drop(x):
        c.run("begin")
        return torch.dropout(torch.tanh(x @ c.w0), 0.5, True) @ c.w1

    torch.manual_seed(7)
    y = checkpoint(drop, torch.dropout(c.x, 0.25, True), **options)
    c.backward(torch.dropout(y, 0.25, True))
    c.values.append(torch.rand(3, dtype=c.dtype))


@case
def dropout(c):
    drops(c)


@case
def dropout_with_other_numbers(c):
    drops(c, preserve_rng_state=False)


@case
def autocast(c):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = checkpoint(c.segment, c.x)
    c.backward(y.to(c.dtype))


@case
def autocast_in_backward_only(c):
    y = checkpoint(c.segment, c.x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        c.backward(y)


@case
def retain_graph(c):
    y = checkpoint(c.segment, c.x)
    c.backward(y, retain_graph=True)
    c.backward(y)


@case
def double_backward(c):
    y = checkpoint(c.segment, c.x)
    (gradient,) = torch.autograd.grad(y.sum(), c.x, create_graph=True)
    c.values.append(gradient)
    gradient.square().sum().backward()


@case
def backward_twice(c):
    y = checkpoint(c.segment, c.x)
    (gradient,) = torch.autograd.grad(y.sum(), c.w0, retain_graph=True)
    c.values.append(gradient)
    c.backward(y)


def with_inner_gradient(c, retain_graph, **options):
    def inner(x):
        c.run("begin")
        y = torch.tanh(x @ c.w0)
        (gradient,) = torch.autograd.grad(y.sum(), x, retain_graph=retain_graph)
        c.run("middle")
        z = torch.sin(y @ c.w1 if retain_graph else x @ c.w1) * gradient
        c.run("end")
        return z

    c.backward(checkpoint(inner, c.x, **options))


@case
def backward_inside(c):
    with_inner_gradient(c, retain_graph=True)


@case
def backward_inside_that_frees_its_graph(c):
    with_inner_gradient(c, retain_graph=False)


@case
def backward_inside_no_early_stop(c):
    with_inner_gradient(c, retain_graph=True, early_stop=False)


@case
def no_grad(c):
    with torch.no_grad():
        y = checkpoint(c.segment, c.x)
    c.values.append(y)
    c.values.append(y.new_tensor(float(y.requires_grad)))


@case
def sequential(c):
    modules = torch.nn.Sequential()
    for weight in [c.w0, c.w1, c.w2, c.w0, c.w1]:
        linear = torch.nn.Linear(SIDE, SIDE, bias=False)
        linear.weight = torch.nn.Parameter(weight.detach().clone())
        modules.append(linear)
        modules.append(torch.nn.Tanh())
    y = checkpoint_sequential(modules, 3, c.x, use_reentrant=False)
    c.backward(y)
    c.values.extend(parameter.grad for parameter in modules.parameters())


@case
def fails_in_forward(c):
    def fails(x):
        y = c.segment(x)
        raise RuntimeError("this part fails")

    checkpoint(fails, c.x)


@case
def fails_when_computed_again(c):
    def fails(x):
        if c.run("begin") == 2:
            raise RuntimeError("this part fails")
        return torch.tanh(x @ c.w0)

    c.backward(checkpoint(fails, c.x))


def changes(c, first, again, **options):
    def change(x):
        return (first if c.run("begin") == 1 else again)(x)

    c.backward(checkpoint(change, c.x, **options))


@case
def saves_less(c):
    changes(c, lambda x: torch.sin(torch.tanh(x)), torch.tanh)


@case
def saves_less_unchecked(c):
    changes(c, lambda x: torch.sin(torch.tanh(x)), torch.tanh, determinism_check="none")


@case
def saves_more(c):
    changes(c, torch.tanh, lambda x: torch.sin(torch.tanh(x)), early_stop=False)


@case
def saves_more_behind_the_early_stop(c):
    changes(c, torch.tanh, lambda x: torch.sin(torch.tanh(x)))


@case
def saves_other_shapes(c):
    changes(c, torch.tanh, lambda x: torch.tanh(x[:2]))


@case
def saves_other_types(c):
    changes(c, torch.tanh, lambda x: torch.tanh(x.to(torch.bfloat16)))


@case
def saves_other_types_unchecked(c):
    other = torch.float64 if c.dtype == torch.float32 else torch.float32
    changes(c, torch.tanh, lambda x: torch.tanh(x.to(other)), determinism_check="none")


class ReadsTwice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        ctx.saved_tensors
        (x,) = ctx.saved_tensors
        return gradient * x


@case
def reads_twice(c):
    c.backward(checkpoint(ReadsTwice.apply, c.x))


@case
def input_is_changed(c):
    x = c.x * 2
    y = checkpoint(c.segment, x)
    x.add_(1)
    c.backward(y)


def doubles_its_input(c, x):
    c.run("begin")
    return torch.tanh(x.mul_(2) @ c.w0)


@case
def input_is_changed_by_an_inner_segment(c):
    c.backward(checkpoint(lambda x: checkpoint(lambda y: doubles_its_input(c, y), x @ c.w1), c.x))


def counting_hooks(c):
    def pack(tensor):
        if tensor.numel() > 0:  # torch.utils.checkpoint saves an empty one of its own
            c.run("pack")
        return tensor.detach().clone()

    def unpack(kept):
        if kept.numel() > 0:
            c.run("unpack")
        return kept

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


@case
def input_is_changed_by_the_segment_inside_of_hooks(c):
    with counting_hooks(c):
        y = checkpoint(lambda x: doubles_its_input(c, x), torch.tanh(c.x @ c.w1))
    c.backward(y)


@case
def hooks_around_and_inside(c):
    def inside(x):
        y = c.segment(x)
        with counting_hooks(c):
            y = torch.tanh(y @ c.w2)
        return torch.cos(y)

    with counting_hooks(c):
        y = checkpoint(inside, torch.tanh(c.x))
    c.backward(y)


def create_graph_inside(c, x):
    def inner(x):
        c.run("begin")
        y = torch.tanh(x @ c.w0)
        (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        c.run("middle")
        return torch.sin(y @ c.w1) * gradient

    c.backward(checkpoint(inner, x))


@case
def backward_inside_creates_a_graph(c):
    create_graph_inside(c, c.x)


@case
def backward_inside_ends_at_an_input_with_history(c):
    create_graph_inside(c, torch.tanh(c.x))


@case
def double_backward_nested(c):
    y = checkpoint(lambda x: outer(c, x), c.x)
    (gradient,) = torch.autograd.grad(y.sum(), c.x, create_graph=True)
    c.values.append(gradient)
    gradient.square().sum().backward()


@case
def inputs_in_containers(c):
    def sums(tensors, pair):
        c.run("begin")
        return torch.tanh(tensors[0] @ tensors[1]) * pair[0] @ pair[1]

    c.backward(checkpoint(sums, [c.x, torch.tanh(c.w0)], (0.5, torch.sin(c.w1))))


def result(function, dtype):
    c = Case(dtype)
    error = None
    try:
        function(c)
    except RuntimeError as raised:
        error = next((kind for text, kind in ERRORS.items() if text in str(raised)), str(raised))
    if error is None:
        c.values.extend(leaf.grad for leaf in [c.x, c.w0, c.w1, c.w2])
    return {
        "values": [None if value is None else value.detach().double().flatten().tolist() for value in c.values],
        "ran": c.ran,
        "error": error,
    }


def main():
    cases = {f"{name} {str(dtype)[6:]}": result(function, dtype) for name, function in CASES.items() for dtype in [torch.float32, torch.float64]}
    print("{\n" + ",\n".join(f'"{name}": {json.dumps(found)}' for name, found in cases.items()) + "\n}")


if __name__ == "__main__":
    sys.exit(main())
