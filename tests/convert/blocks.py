"""Small modules as models have them, written with torch alone."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class Holder(nn.Module):
    """One layer of this weight, of whatever size."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.up = nn.Linear(1, 1, bias=False)
        self.up.weight = nn.Parameter(weight)


class GatedMLP(nn.Module):
    """As in Llama, Qwen and Mistral; with GELU in its tanh form, as in Gemma."""

    def __init__(self, width: int = 32, inner: int = 64, *, bias: bool = False, act: nn.Module | None = None) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=bias)
        self.up_proj = nn.Linear(width, inner, bias=bias)
        self.down_proj = nn.Linear(inner, width, bias=bias)
        self.act_fn = act or nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class HalvesMLP(nn.Module):
    """As in Phi-3: gate and up are one matrix already."""

    def __init__(self, width: int = 32, inner: int = 64) -> None:
        super().__init__()
        self.gate_up = nn.Linear(width, 2 * inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, hidden):
        gate, up = self.gate_up(hidden).chunk(2, dim=-1)
        return self.down(up * F.silu(gate))


class Transposed(nn.Module):
    """As in GPT-2: y = x W + b for W (in, out)."""

    def __init__(self, columns: int, rows: int) -> None:
        super().__init__()
        self.columns = columns
        self.weight = nn.Parameter(torch.randn(rows, columns) / rows**0.5)
        self.bias = nn.Parameter(torch.randn(columns))

    def forward(self, x):
        out = x.size()[:-1] + (self.columns,)
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(out)


class TransposedMLP(nn.Module):
    """As in GPT-2, with a dropout behind."""

    def __init__(self, width: int = 32, inner: int = 64, p: float = 0.0) -> None:
        super().__init__()
        self.c_fc, self.c_proj = Transposed(inner, width), Transposed(width, inner)
        self.act, self.dropout = nn.GELU(approximate="tanh"), nn.Dropout(p)

    def forward(self, hidden_states):
        return self.dropout(self.c_proj(self.act(self.c_fc(hidden_states))))


class Residual(nn.Module):
    """As in BERT: a product, the residual, a norm."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.dense, self.norm = nn.Linear(width, width), nn.LayerNorm(width)

    def forward(self, hidden, residual):
        return self.norm(self.dense(hidden) + residual)


class Attention(nn.Module):
    """One head; its forward is no chain."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x, mask=None, **options):
        return self.o(F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x), mask))


class Layer(nn.Module):
    """A layer of a decoder."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first, self.second = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention, self.mlp = Attention(width), GatedMLP(width)

    def forward(self, x, mask=None, position=None):
        x = x + self.attention(self.first(x), mask=mask)
        return x + self.mlp(self.second(x))


class Model(nn.Module):
    """Two layers between an embedding and a head that shares its matrix."""

    def __init__(self, width: int = 32, words: int = 48) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.layers = nn.ModuleList([Layer(width), Layer(width)])
        self.lm_head = nn.Linear(width, words, bias=False)
        self.lm_head.weight = self.embed.weight

    def forward(self, words, mask=None, position=None):
        x = self.embed(words)
        for layer in self.layers:
            x = layer(x, mask, position)
        return self.lm_head(x)
