"""Which modules TRL's own get_act_offloading_ctx_manager leaves alone, of random models.

Usage: python3 trl_heads.py TRL_FOLDER >../../hooks/activations/testdata/trl_heads.json

TRL_FOLDER and the Python are those of trl_log.py. TRL's file is loaded unmodified; the hooks that
it puts around modules are noted. module_heads_test.cc asks FindHeads about the same models.
"""

import json
import random
import sys

import torch

import trl_log

# Submodules. "=parameter" and "=buffer" mark a parameter or buffer of that name.
TOP = ["layers.0.mlp", "layers.0.LigerMLP.up", "liger_loss", "output", "output=parameter",
       "output=buffer", "output.linear", "lm_head", "decoder.output", "decoder.lm_head",
       "decoder.layers", "decoder=parameter", "final_layer_norm", "ln_f", "head", "head=parameter",
       "head.Liger", "xLIGERx.lm_head"]
WRAPPERS = ["", "module.", "base_model.", "module.base_model.", "module.module."]
MARKERS = ["peft_config", "peft_config=buffer", "module.peft_config", "module.peft_config=buffer"]


def random_model(draw):
    """Names to register, in their order."""
    wrapper = draw.choice(WRAPPERS)
    names = [wrapper + name for name in draw.sample(TOP, draw.randint(1, 4))]
    names += draw.sample(TOP, draw.randint(0, 1)) + draw.sample(MARKERS, draw.randint(0, 2))
    draw.shuffle(names)
    known, kept = {}, []
    for name in names:
        path, _, kind = name.partition("=")
        # A name can be used once, and a parameter has no children.
        parts = path.split(".")
        prefixes = [".".join(parts[:n]) for n in range(1, len(parts))]
        if path in known or any(known.get(prefix) for prefix in prefixes):
            continue
        known.update({prefix: "" for prefix in prefixes})
        known[path] = kind
        kept.append(name)
    return kept


def build(names):
    root = torch.nn.Module()
    for name in names:
        path, _, kind = name.partition("=")
        *outer, last = path.split(".")
        module = root
        for part in outer:
            if part not in module._modules:
                module.add_module(part, torch.nn.Module())
            module = module._modules[part]
        if kind == "parameter":
            module.register_parameter(last, torch.nn.Parameter(torch.ones(1)))
        elif kind == "buffer":
            module.register_buffer(last, torch.ones(1))
        elif last not in module._modules:
            module.add_module(last, torch.nn.Module())
    return root


def main():
    trl = trl_log.load_trl(sys.argv[1])
    trl_log.stand_in_for_the_accelerator()
    warnings = []
    trl.logger = trl_log.types.SimpleNamespace(warning=warnings.append)
    hooked = []
    torch.nn.Module.register_forward_hook = lambda *args, **options: None
    torch.nn.Module.register_forward_pre_hook = lambda module, hook: hooked.append(module)
    models = []
    draw = random.Random(1)
    for _ in range(200):
        names = random_model(draw)
        model = build(names)
        hooked.clear()
        warnings.clear()
        trl.get_act_offloading_ctx_manager(model)
        paths = {module: path for path, module in model.named_modules()}
        models.append({"names": names, "heads": [paths[module] for module in hooked],
                       "warns": bool(warnings)})
    print("[\n" + ",\n".join(json.dumps(model) for model in models) + "\n]")


if __name__ == "__main__":
    main()
