"""A decoder-only GPT whose layers receive the context-parallel handler and never a group.

The model sees the rows of one rank in one micro-batch: parts of sequences, packed end to end, or no
rows at all. Only attention and the rotary embedding need other rows or positions; both ask the
handler.
"""

# T rows on this rank, H query heads, G key and value heads D head size, V vocabulary.

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hcp
from hcp._words import CommType
from hcp.attention.rotary import Rotary
from hcp.tools.programs.text_data import VOCABULARY_SIZE


class RotaryEmbedding(nn.Module):
    """The rotary angles, (positions, D). The handler knows the number of positions, and the
    position of each row."""

    def __init__(self, head_size: int, base: float = 10_000.0) -> None:
        super().__init__()
        self.head_size = head_size
        self.base = base

    def forward(self, positions: int, like: Tensor) -> Tensor:
        exponents = torch.arange(0, self.head_size, 2, device=like.device, dtype=torch.float64)
        frequencies = self.base ** (-exponents / self.head_size)
        places = torch.arange(positions, device=like.device, dtype=torch.float64)
        angles = torch.outer(places, frequencies).to(like.dtype)
        return torch.cat((angles, angles), dim=-1)


class Attention(nn.Module):
    def __init__(self, args: argparse.Namespace, layer: int) -> None:
        super().__init__()
        self.heads = args.num_attention_heads
        self.groups = args.num_query_groups
        self.head_size = args.hidden_size // self.heads
        self.layer = layer
        self.comm_type: CommType | None = args.config.comm_type(layer)
        self.window_size = args.config.window(layer)
        self.linear_qkv = nn.Linear(
            args.hidden_size, (self.heads + 2 * self.groups) * self.head_size, bias=False
        )
        self.linear_proj = nn.Linear(args.hidden_size, args.hidden_size, bias=False)

    def forward(self, x: Tensor, cp: hcp.ContextParallelHandler, rotary: Rotary) -> Tensor:
        sizes = (self.heads, self.groups, self.groups)
        qkv = self.linear_qkv(x).view(x.shape[0], sum(sizes), self.head_size)
        q, k, v = qkv.split(sizes, dim=1)  # (T, H, D), (T, G, D), (T, G, D)
        out = cp.attention(
            *(q, k, v),
            causal=True,
            window_size=self.window_size,
            comm_type=self.comm_type,
            rotary_pos_emb=rotary,
            layer=self.layer,
        )
        projected: Tensor = self.linear_proj(out.reshape(x.shape))
        return projected


class MLP(nn.Module):
    """A feed-forward layer with SwiGLU."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(args.hidden_size, 2 * args.ffn_hidden_size, bias=False)
        self.linear_fc2 = nn.Linear(args.ffn_hidden_size, args.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.linear_fc1(x).chunk(2, dim=-1)
        down: Tensor = self.linear_fc2(F.silu(gate) * up)
        return down


class TransformerLayer(nn.Module):
    def __init__(self, args: argparse.Namespace, layer: int) -> None:
        super().__init__()
        self.input_norm = nn.RMSNorm(args.hidden_size, eps=1e-5)
        self.attention = Attention(args, layer)
        self.mlp_norm = nn.RMSNorm(args.hidden_size, eps=1e-5)
        self.mlp = MLP(args)

    def forward(self, x: Tensor, cp: hcp.ContextParallelHandler, rotary: Rotary) -> Tensor:
        attended: Tensor = x + self.attention(self.input_norm(x), cp, rotary)
        out: Tensor = attended + self.mlp(self.mlp_norm(attended))
        return out


class GPTModel(nn.Module):
    """A GPT that holds the job layout in pg_collection, as Megatron's models do. eval_cp_context
    swaps it."""

    def __init__(
        self,
        args: argparse.Namespace,
        pg_collection: hcp.ProcessGroups,
        vocabulary: int = VOCABULARY_SIZE,
    ) -> None:
        super().__init__()
        self.pg_collection = pg_collection
        self.word_embeddings = nn.Embedding(vocabulary, args.hidden_size)
        self.rotary_pos_emb = RotaryEmbedding(args.hidden_size // args.num_attention_heads)
        self.layers = nn.ModuleList(
            TransformerLayer(args, layer) for layer in range(args.num_layers)
        )
        self.final_norm = nn.RMSNorm(args.hidden_size, eps=1e-5)
        self.output_layer = nn.Linear(args.hidden_size, vocabulary, bias=False)
        self.initialize(0.02, args.num_layers)
        if not args.untie_embeddings_and_output_weights:
            self.output_layer.weight = self.word_embeddings.weight

    def initialize(self, std: float, num_layers: int) -> None:
        """Draw normal weights, smaller where a layer adds to the residual stream."""
        for name, weight in self.named_parameters():
            adds = name.endswith(("linear_proj.weight", "linear_fc2.weight"))
            if weight.dim() == 2:
                nn.init.normal_(weight, std=std / (2 * num_layers) ** 0.5 if adds else std)

    def forward(self, tokens: Tensor, cp: hcp.ContextParallelHandler) -> Tensor:
        """Return the logits (T, V) of tokens (T,)."""
        logits: Tensor = self.output_layer(self.hidden_states(tokens, cp))
        return logits

    def hidden_states(self, tokens: Tensor, cp: hcp.ContextParallelHandler) -> Tensor:
        """Return what the layers make of tokens (T,), as (T, width)."""
        x = self.word_embeddings(tokens)
        rotary = cp.rotary(self.rotary_pos_emb(cp.get_rotary_seq_len(), like=x))
        for layer in self.layers:
            x = layer(x, cp, rotary)
        hidden: Tensor = self.final_norm(x)
        return hidden
