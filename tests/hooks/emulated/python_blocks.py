"""Blocks of well-known networks, trained from Python within a memory target: python_blocks.py LIBRARY.

Each trains with AdamW and gradients of two micro-batches that add up, at three targets between the
least that its steps take and what they take without offload. The target is the device's limit from
the first step on, in forward and backward. At the lowest target AdamW updates one parameter at a
time, and the limit holds in the optimizer, too. At the other targets AdamW is PyTorch's default, and
the device has no limit during its step: its temporaries are not bounded (docs/users/limits.md). The
parameters get the same bits as without offload.
"""

import math
import sys

import torch
from torch import nn
from torch.nn import functional as F

from op_table import EMU, Library, host_copies

BATCH, TOKENS, WIDTH, HEADS = 4, 48, 64, 4
STEPS, MICRO_BATCHES = 6, 2
UNLIMITED = 1 << 30
# Places of the targets between the least (0) and the peak without offload (16), each with AdamW's
# foreach. PyTorch's default, None, chooses True here: temporaries of all parameters at once.
TARGETS = [(0, False), (8, None), (15, None)]


class RmsNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def rotated(x):
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[-2], device=x.device)[:, None] / 100 ** (torch.arange(half, device=x.device) / half)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * angle.cos() - second * angle.sin(), first * angle.sin() + second * angle.cos()], -1)


class Attention(nn.Module):
    def __init__(self, rotary=False, causal=False, dropout=0.0):
        super().__init__()
        self.rotary, self.causal, self.dropout = rotary, causal, dropout
        self.q, self.kv, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, context=None, bias=None, padding=None):
        def heads(t):
            return t.unflatten(-1, (HEADS, -1)).transpose(1, 2)

        context = x if context is None else context
        q, (k, v) = heads(self.q(x)), map(heads, self.kv(context).chunk(2, -1))
        if self.rotary:
            q, k = rotated(q), rotated(k)
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        if bias is not None:
            scores = scores + bias
        if self.causal:
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
            scores = scores.masked_fill(mask, -math.inf)
        if padding is not None:
            scores = scores.masked_fill(padding[:, None, None, :], -1e4)
        weights = F.dropout(scores.softmax(-1), self.dropout, self.training)
        return self.out((weights @ v).transpose(1, 2).flatten(-2))


class Llama(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(RmsNorm() for _ in range(2))
        self.attention = Attention(rotary=True, causal=True)
        self.gate, self.up, self.down = nn.Linear(WIDTH, 128), nn.Linear(WIDTH, 128), nn.Linear(128, WIDTH)

    def forward(self, x):
        x = x + self.attention(self.norms[0](x))
        h = self.norms[1](x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Gpt2(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.attention = Attention(causal=True, dropout=0.1)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1))

    def forward(self, x):
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class T5(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(RmsNorm() for _ in range(3))
        self.bias = nn.Embedding(8, HEADS)
        self.own, self.cross = Attention(), Attention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 128, bias=False), nn.ReLU(), nn.Linear(128, WIDTH, bias=False))

    def forward(self, x):
        place = torch.arange(x.shape[1], device=x.device)
        near = (place[None] - place[:, None]).clamp(-4, 3) + 4
        x = x + self.own(self.norms[0](x), bias=self.bias(near).permute(2, 0, 1)[None])
        x = x + self.cross(self.norms[1](x), context=x.flip(1))
        return x + self.mlp(self.norms[2](x))


class Bert(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.norms = Attention(dropout=0.1), nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 128), nn.GELU(), nn.Linear(128, WIDTH))

    def forward(self, x):
        lengths = torch.arange(1, x.shape[0] + 1, device=x.device) * x.shape[1] // x.shape[0]
        padding = torch.arange(x.shape[1], device=x.device)[None] >= lengths[:, None]
        x = self.norms[0](x + self.attention(x, padding=padding))
        return self.norms[1](x + self.mlp(x)) * ~padding[..., None]


class Albert(nn.Module):
    """One layer, three times over."""

    def __init__(self):
        super().__init__()
        self.attention, self.norm = Attention(), nn.LayerNorm(WIDTH)
        self.gate, self.down = nn.Linear(WIDTH, 256), nn.Linear(128, WIDTH)

    def forward(self, x):
        for _ in range(3):
            x = x + self.attention(self.norm(x))
            x = x + self.down(F.glu(self.gate(self.norm(x)), dim=-1))
        return x


class Vit(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches, self.token = nn.Conv2d(4, WIDTH, 4, 4), nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.norm, self.attention, self.head = nn.LayerNorm(WIDTH), Attention(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        picture = x.reshape(x.shape[0], 4, 24, 32)
        h = self.patches((picture - picture.mean()) / picture.std()).flatten(2).transpose(1, 2)
        h = torch.cat([self.token.expand(h.shape[0], -1, -1), h], 1)
        h = h + self.attention(self.norm(h))
        return self.head(h[:, :1]).expand_as(x) + x


class ConvNext(nn.Module):
    def __init__(self):
        super().__init__()
        self.depthwise = nn.Conv2d(WIDTH, WIDTH, 7, padding=3, groups=WIDTH)
        self.norm, self.scale = nn.LayerNorm(WIDTH), nn.Parameter(torch.full((WIDTH,), 0.1))
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 128), nn.GELU(), nn.Linear(128, WIDTH))

    def forward(self, x):
        h = self.depthwise(x.transpose(1, 2).unflatten(-1, (6, 8))).permute(0, 2, 3, 1)
        return x + (self.scale * self.mlp(self.norm(h))).flatten(1, 2)


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(WIDTH, WIDTH, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(WIDTH) for _ in range(2))

    def forward(self, x):
        picture = x.transpose(1, 2).unflatten(-1, (6, 8))
        h = F.relu(self.norms[0](self.layers[0](picture)), inplace=True)
        h = F.relu(self.norms[1](self.layers[1](h)) + picture)
        return h.flatten(2).transpose(1, 2)


class Unet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.middle = nn.Conv2d(WIDTH, 96, 3, 2, 1), nn.Conv2d(96, 96, 3, padding=1)
        self.up, self.norm = nn.Conv2d(96 + WIDTH, WIDTH, 3, padding=1), nn.GroupNorm(4, 96)
        self.time = nn.Linear(16, 96)

    def forward(self, x):
        picture = x.transpose(1, 2).unflatten(-1, (6, 8))
        step = torch.arange(16, device=x.device) / 16
        noisy = picture + 0.1 * torch.randn_like(picture)
        h = F.silu(self.down(noisy)) + self.time(torch.cos(step))[:, None, None]
        h = F.silu(self.norm(self.middle(h)))
        h = torch.cat([F.interpolate(h, scale_factor=2.0, mode="nearest"), noisy], 1)
        return self.up(h).flatten(2).transpose(1, 2)


class MambaScan(nn.Module):
    def __init__(self):
        super().__init__()
        self.into, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        value, decay, gate = self.into(x).chunk(3, -1)
        state, states = torch.zeros_like(x[:, 0]), []
        for token in range(0, x.shape[1], 4):
            kept = torch.exp(-F.softplus(decay[:, token]))
            state = kept * state + (1 - kept) * value[:, token]
            states.append(state)
        return x + self.out(torch.stack(states, 1).repeat_interleave(4, 1) * F.silu(gate))


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 96), nn.SiLU(), nn.Linear(96, WIDTH)) for _ in range(4))

    def forward(self, x):
        tokens = x.flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1).topk(2)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            rows, place = (chosen == number).nonzero(as_tuple=True)
            out = out.index_add(0, rows, expert(tokens[rows]) * weights[rows, place, None])
        return x + out.view_as(x)


class Lora(nn.Module):
    def __init__(self):
        super().__init__()
        self.frozen = Llama().requires_grad_(False)
        self.a, self.b = nn.Linear(WIDTH, 8, bias=False), nn.Linear(8, WIDTH, bias=False)

    def forward(self, x):
        return self.frozen(x) + self.b(self.a(F.dropout(x, 0.1, self.training)))


BLOCKS = [Llama, Gpt2, T5, Bert, Albert, Vit, ConvNext, ResNet, Unet, MambaScan, Experts, Lora]
# Also under torch.amp.autocast.
AUTOCAST = [Gpt2]


class Run:
    """The steps of a block, within a target or without offload."""

    def __init__(self, library, block, autocast, foreach, target=None, limit=None):
        functions = library.functions
        functions.op_table_seed(1)
        generator = torch.Generator().manual_seed(2)
        torch.manual_seed(3)
        model = nn.Sequential(*(block() for _ in range(3))).to(EMU)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, foreach=foreach)
        batches = [torch.randn(BATCH, TOKENS, WIDTH, generator=generator).to(EMU) for _ in range(MICRO_BATCHES)]
        if target is not None:
            functions.op_table_set_target(target)
        if limit is not None:
            functions.op_table_limit(limit)
        before = library.counts()
        self.peak = self.update_peak = 0  # of forward and backward, and of the optimizer
        for step in range(STEPS):
            functions.op_table_take_peak()
            if target is not None:
                functions.op_table_open_scope()
            with torch.autocast("emu", torch.bfloat16, enabled=autocast):
                loss = model(batches[step % MICRO_BATCHES]).float().square().mean()
            if target is not None:
                functions.op_table_close_scope()
            loss.backward()
            del loss
            torch.accelerator.current_stream(EMU).synchronize()
            self.peak = max(self.peak, functions.op_table_take_peak())
            if step % MICRO_BATCHES == MICRO_BATCHES - 1:
                if limit is not None and foreach is None:
                    functions.op_table_limit(UNLIMITED)
                optimizer.step()
                self.update_peak = max(self.update_peak, functions.op_table_take_peak())
                if limit is not None:
                    functions.op_table_limit(limit)
                optimizer.zero_grad()
        self.parameters = host_copies(model.parameters())
        self.steps_over = functions.op_table_steps_over_target()
        self.offloaded, self.evicted, self.fetched = (a - b for a, b in zip(library.counts(), before))
        functions.op_table_limit(UNLIMITED)


def complaints(library, block, autocast, plain, least, sixteenths, foreach):
    """Trains a block within a target and returns its deviations from `plain`."""
    target = least.peak + (plain.peak - least.peak) * sixteenths // 16
    if foreach is False:
        target = max(target, least.update_peak)
    try:
        within = Run(library, block, autocast, foreach, target=target, limit=target)
    except torch.OutOfMemoryError as error:
        library.functions.op_table_close_scope()
        library.functions.op_table_limit(UNLIMITED)
        return [f"{target} bytes (least {least.peak}, plain {plain.peak}) are not enough: {error}"]
    print(f"{block.__name__}{' under autocast' if autocast else ''}: plain {plain.peak}, least {least.peak}, target {target}, peak {within.peak}, "
          f"{within.offloaded} offloaded, {within.evicted} bytes evicted, {within.fetched} fetched", flush=True)
    wrong = []
    if not all(torch.equal(a, b) for a, b in zip(within.parameters, plain.parameters)):
        wrong.append(f"other parameters than without offload within {target} bytes")
    if within.peak > target or within.steps_over > 0:
        wrong.append(f"{within.peak} bytes, {within.steps_over} steps over {target}")
    if min(within.evicted, within.fetched) == 0:
        wrong.append(f"evicted or fetched nothing within {target} bytes")
    return wrong


def main():
    library = Library(sys.argv[1])
    failures = []
    for block, autocast in [(b, False) for b in BLOCKS] + [(b, True) for b in AUTOCAST]:
        name = block.__name__ + (" under autocast" if autocast else "")
        plain = {foreach: Run(library, block, autocast, foreach) for foreach in (False, None)}
        least = Run(library, block, autocast, False, target=1)
        if least.peak >= plain[False].peak:
            failures.append(f"{name}: the least, {least.peak}, is not below the peak without offload")
        for sixteenths, foreach in TARGETS:
            failures += [f"{name}: {complaint}" for complaint in
                         complaints(library, block, autocast, plain[foreach], least, sixteenths, foreach)]
    for failure in failures:
        print("FAILED:", failure)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
