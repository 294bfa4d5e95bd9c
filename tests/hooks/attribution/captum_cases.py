"""What Captum 0.9.0 answers in a list of random cases, as JSON: captum_cases.py > captum_cases.json.

Each case is a model, a method, layers, a target and options, all drawn by a seed. captum_test.cc builds the model that a
case describes and asks Pinion the same. Needs torch, and Captum without what it draws pictures with.
"""

import json
import random
import sys
from unittest import mock

DRAWING = "PIL PIL.Image mpl_toolkits mpl_toolkits.axes_grid1 matplotlib".split()
DRAWING += [f"matplotlib.{part}" for part in "axes collections colors figure image pyplot".split()]
sys.modules.update({name: mock.MagicMock() for name in DRAWING})

import numpy
import torch
from captum._utils.gradient import compute_layer_gradients_and_eval
from captum.attr import (
    InputXGradient,
    IntegratedGradients,
    InternalInfluence,
    LayerActivation,
    LayerAttribution,
    LayerConductance,
    LayerGradCam,
    LayerGradientShap,
    LayerGradientXActivation,
    LayerIntegratedGradients,
    Saliency,
)
from torch import nn

# Numbers of cases: methods with one pass, and methods along a path.
CASES = 48
PATH_CASES = 50
METHODS = ["primitive", "activation", "gradient_x_activation", "grad_cam", "saliency", "input_x_gradient"]
PATH_METHODS = ["integrated_gradients", "layer_integrated_gradients", "internal_influence", "layer_conductance", "gradient_shap"]
QUADRATURES = ["gausslegendre", "riemann_left", "riemann_middle", "riemann_right", "riemann_trapezoid"]
REFUSALS = ["does not require grad", "not have been used in the graph", "in-place operation"]
# Examples in LayerGradientShap's distribution of baselines.
BASELINES = 3
ACTIVATIONS = {
    "relu": nn.ReLU,
    "relu_": lambda: nn.ReLU(inplace=True),
    "tanh": nn.Tanh,
    "gelu": nn.GELU,
    "sigmoid": nn.Sigmoid,
}


def numbers(shape, seed, dtype):
    i = torch.arange(torch.Size(shape).numel())
    return (((i * i * 3 + i * 7 + seed * 5) % 23 - 11).to(dtype) / 16).view(shape)


class Residual(nn.Module):
    def __init__(self, *body):
        super().__init__()
        self.body = nn.Sequential(*body)

    def forward(self, x):
        return x + self.body(x)


class Split(nn.Module):
    def forward(self, x):
        return x.chunk(2, 1)


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.split = Split()

    def forward(self, x):
        a, b = self.split(x)
        return torch.cat([a * torch.tanh(b), b], 1)


class Twice(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.shared = nn.Linear(features, features)

    def forward(self, x):
        return self.shared(torch.tanh(self.shared(x)))


class Again(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.shared = nn.Linear(features, features)

    def forward(self, x):
        h = self.shared(x)
        return h + self.shared(torch.tanh(h)) * h


class Aside(nn.Module):
    def __init__(self):
        super().__init__()
        self.unused = nn.Tanh()

    def forward(self, x):
        self.unused(x)
        return torch.sin(x)


class Sum(nn.Module):
    def forward(self, x):
        return x.sum(1)


class Grid(nn.Module):
    def forward(self, x):
        return x.view(len(x), 2, -1)


def build(kind, *sizes):
    if kind in ACTIVATIONS:
        return ACTIVATIONS[kind]()
    return {
        "conv": lambda: nn.Conv2d(*sizes, 3, padding=1),
        "pool": lambda: nn.MaxPool2d(2, 1),
        "flatten": nn.Flatten,
        "linear": lambda: nn.Linear(*sizes),
        "residual": lambda: Residual(nn.Linear(*sizes), nn.Tanh()),
        "gate": Gate,
        "twice": lambda: Twice(*sizes),
        "again": lambda: Again(*sizes),
        "aside": Aside,
        "sum": Sum,
        "grid": Grid,
    }[kind]()


def draw_model(r):
    parts = []

    def activation():
        parts.append([r.choice(sorted(ACTIVATIONS))])

    images = r.random() < 0.6
    if images:
        parts.append(["conv", 2, 2])
        activation()
        if r.random() < 0.5:
            parts.append(["conv", 2, 2])
            activation()
        side = 3
        if r.random() < 0.5:
            parts.append(["pool"])
            side = 2
        parts.append(["flatten"])
        features = 2 * side * side
    else:
        features = 5
    parts.append(["linear", features, 4])
    for _ in range(r.randint(1, 3)):
        kind = r.choice(["activation", "residual", "gate", "twice", "aside", "linear"])
        if kind == "activation":
            activation()
        else:
            parts.append([kind] + {"residual": [4, 4], "twice": [4], "linear": [4, 4]}.get(kind, []))
    parts.append(["linear", 4, 4])
    return images, parts


def layers_of(parts):
    inner = {"residual": ["", ".body.0", ".body.1"], "gate": [".split"], "twice": [".shared"], "aside": [".unused"]}
    # Taps on parts that are in no list would capture a neighbour's value.
    skipped = {"flatten", "sum", "grid"}
    return [f"{i}{name}" for i, (kind, *_) in enumerate(parts) if kind not in skipped for name in inner.get(kind, [""])]


def draw_case(seed):
    r = random.Random(seed)
    images, parts = draw_model(r)
    batch = r.randint(2, 3)
    target = r.choice(["none", "class", "tensor", "per_example", "index", "index_per_example"])
    classes = [r.randint(0, 3) for _ in range(batch)]
    indices = [[r.randint(0, 1), r.randint(0, 1)] for _ in range(batch)]
    value = {
        "none": None,
        "class": classes[0],
        "tensor": classes,
        "per_example": classes,
        "index": indices[0],
        "index_per_example": indices,
    }[target]
    if target == "none":
        parts.append(["sum"])
    if target.startswith("index"):
        parts.append(["grid"])
    is_path = seed >= CASES
    method = PATH_METHODS[seed % len(PATH_METHODS)] if is_path else METHODS[seed % len(METHODS)]
    layers = layers_of(parts)
    case = {
        "seed": seed,
        "model": parts,
        "frozen": r.random() < 0.3,
        "inputs": [batch, 2, 3, 3] if images else [batch, 5],
        "method": method,
        "layers": r.sample(layers, 1 if is_path or method == "grad_cam" else r.randint(1, min(3, len(layers)))),
        "to_input": r.random() < 0.4,
        "target": [target, value],
        "flag": r.random() < 0.5,
        "other_flag": r.random() < 0.5,
    }
    if is_path:
        case["steps"] = r.choice([2, 3, 6])
        case["quadrature"] = r.choice(QUADRATURES)
        case["baseline"] = r.choice(["zeros", "one", "each"])
        case["batched"] = r.random() < 0.5
    return case


def called_again(seed):
    """A layer whose calls all have a part in the output, with the default number of steps."""
    return {
        "seed": seed,
        "model": [["linear", 5, 4], ["again", 4], ["linear", 4, 4]],
        "frozen": False,
        "inputs": [2, 5],
        "method": "layer_integrated_gradients",
        "layers": ["1.shared"],
        "to_input": False,
        "target": ["class", 1],
        "flag": True,
        "other_flag": False,
        "steps": 50,
        "quadrature": "gausslegendre",
        "baseline": "zeros",
        "batched": True,
    }


def target_of(case):
    kind, value = case["target"]
    if kind == "tensor":
        return torch.tensor(value)
    if kind == "index":
        return tuple(value)
    if kind == "index_per_example":
        return [tuple(index) for index in value]
    return value


def path_answer(case, model, layer, x, dtype):
    """The attribution, and what its convergence delta is where other programs than ours tell it."""
    seed, steps = case["seed"], case["steps"]
    shape = {"zeros": None, "one": [1] + case["inputs"][1:], "each": case["inputs"]}[case["baseline"]]
    baseline = None if shape is None else numbers(shape, seed + 200, dtype)
    target, to_input, flag = target_of(case), case["to_input"], case["flag"]
    if case["method"] == "gradient_shap":
        samples = torch.arange(len(x) * steps)
        noise = numbers([len(samples)] + case["inputs"][1:], seed + 300, dtype) / 8
        with (
            mock.patch.object(numpy.random, "choice", lambda count, size: ((samples * 7 + seed) % count).numpy()),
            mock.patch.object(numpy.random, "uniform", lambda low, high, size: ((samples * 5 + seed) % 11).double().numpy() / 11),
            mock.patch.object(torch, "normal", lambda mean, deviation: noise if case["other_flag"] else noise * 0),
        ):
            method = LayerGradientShap(model, layer, multiply_by_inputs=flag)
            distribution = numbers([BASELINES] + case["inputs"][1:], seed + 200, dtype)
            return [as_list(method.attribute(x, distribution, n_samples=steps, target=target, attribute_to_layer_input=to_input))]
    options = {"target": target, "n_steps": steps, "method": case["quadrature"]}
    options["internal_batch_size"] = 2 * len(x) if case["batched"] else None
    if case["method"] == "internal_influence":
        return [as_list(InternalInfluence(model, layer).attribute(x, baseline, attribute_to_layer_input=to_input, **options))]
    options["return_convergence_delta"] = True
    if case["method"] == "integrated_gradients":
        result, delta = IntegratedGradients(model, multiply_by_inputs=flag).attribute(x, baseline, **options)
    elif case["method"] == "layer_conductance":
        result, delta = LayerConductance(model, layer).attribute(x, baseline, attribute_to_layer_input=to_input, **options)
    else:
        method = LayerIntegratedGradients(model, layer, multiply_by_inputs=flag)
        result, delta = method.attribute(x, baseline, attribute_to_layer_input=to_input, **options)
    return [as_list(result), [delta]]


def as_list(result):
    return list(result) if isinstance(result, (tuple, list)) else [result]


def as_lists(result):
    """Per layer and tensor."""
    layers = result if isinstance(result, list) else [result]
    return [list(layer) if isinstance(layer, (tuple, list)) else [layer] for layer in layers]


def answer(case, dtype):
    model = nn.Sequential(*[build(*part) for part in case["model"]]).to(dtype)
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            parameter.copy_(numbers(parameter.shape, case["seed"] + i, dtype))
    model.requires_grad_(not case["frozen"])
    x = numbers(case["inputs"], case["seed"] + 100, dtype)
    target, to_input, flag, other_flag = target_of(case), case["to_input"], case["flag"], case["other_flag"]
    layers = [model.get_submodule(name) for name in case["layers"]]
    unused = {"materialize_grads": True}
    if case["method"] in PATH_METHODS:
        result = path_answer(case, model, layers[0], x, dtype)
    elif case["method"] == "primitive":
        gradients, values = compute_layer_gradients_and_eval(
            model, layers, (x,), target, attribute_to_layer_input=to_input, grad_kwargs=unused, offload_to_cpu=flag
        )
        result = as_lists(values) + as_lists(gradients)
    elif case["method"] == "activation":
        result = as_lists(LayerActivation(model, layers).attribute(x, attribute_to_layer_input=to_input))
    elif case["method"] == "gradient_x_activation":
        method = LayerGradientXActivation(model, layers, multiply_by_inputs=flag, memory_efficient=other_flag)
        result = as_lists(method.attribute(x, target, attribute_to_layer_input=to_input, grad_kwargs=unused))
    elif case["method"] == "grad_cam":
        result = as_lists(
            LayerGradCam(model, layers[0]).attribute(
                x, target, attribute_to_layer_input=to_input, relu_attributions=flag, attr_dim_summation=other_flag, grad_kwargs=unused
            )
        )
        for tensors in result:
            if tensors[0].dim() == 4:
                tensors.append(LayerAttribution.interpolate(tensors[0], (5, 7), "bilinear"))
                tensors.append(LayerAttribution.interpolate(tensors[0], 6))
    elif case["method"] == "saliency":
        result = as_lists(Saliency(model).attribute(x, target, abs=flag))
    else:
        result = as_lists(InputXGradient(model).attribute(x, target))
    digits = 9 if dtype == torch.float32 else 17
    return [
        [{"shape": list(t.shape), "values": [float(f"{value:.{digits}g}") for value in t.detach().flatten().tolist()]} for t in tensors]
        for tensors in result
    ]


def main():
    torch.set_num_threads(1)
    lines = []
    drawn = [draw_case(seed) for seed in range(CASES + PATH_CASES)]
    for case in drawn + [called_again(len(drawn))]:
        for dtype in [torch.float32, torch.float64]:
            try:
                case[str(dtype)[6:]] = answer(case, dtype)
            except RuntimeError as error:
                # Unused layers with frozen parameters leave nothing to differentiate. Along a path, Captum rejects unused
                # layers, and layers ahead of an in-place operator.
                assert any(part in str(error) for part in REFUSALS), (case, error)
                case[str(dtype)[6:]] = None
        lines.append(json.dumps(case, separators=(",", ":")))
    print("[\n" + ",\n".join(lines) + "\n]")


if __name__ == "__main__":
    sys.exit(main())
