"""Qwen2 or Llama in plain torch and bfloat16, from a GGUF file.

It gives states, next-token distributions and answers of many rows at once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import log
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from torch import Tensor
from torch.nn import functional

# Mixes the values of a block: number of the block, queries, keys and values [B, H or G, T, D].
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
Keep = Callable[[int, Tensor, Tensor], None]  # gets the keys and values of a block
Block = dict[str, Tensor]

PART = 65_536  # positions of a forward
LOGITS = 8192  # positions whose logits exist at a time
SWEEP = 16  # decoded tokens after which finished rows leave
POSITIONS = 4096  # that rotations are made for
COLDEST = 1e-4  # a temperature of 0 is this one


def product(x: Tensor, matrix: Tensor) -> Tensor:
    """Return x @ matrix.T in float32, of bfloat16 values."""
    if x.is_cuda:
        return torch.mm(x, matrix.T, out_dtype=torch.float32)
    return functional.linear(x.float(), matrix.float())


class Weights:
    """The de-quantised tensors and the facts of a GGUF file."""

    def __init__(self, path: Path, device: str) -> None:
        reader = GGUFReader(path)
        self._fields = reader.fields
        self.architecture = reader.fields["general.architecture"].contents()

        def load(tensor: Any) -> Tensor:
            values = np.array(dequantize(tensor.data, tensor.tensor_type))
            return torch.from_numpy(values).bfloat16().to(device)

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            loaded = list(pool.map(load, reader.tensors))
        self.tensors: dict[str, Tensor] = {}
        for tensor, values in zip(reader.tensors, loaded, strict=True):
            self.tensors[tensor.name] = values

    def fact(self, name: str) -> Any:
        """Return a fact of the architecture."""
        return self._fields[f"{self.architecture}.{name}"].contents()

    def order_rotated(self, width: int) -> None:
        """Put the rows that rotate together in halves, as they are in a file of Qwen's.

        In a file of Llama's they stand beside each other.
        """
        if self.architecture != "llama":
            return
        for name, values in self.tensors.items():
            if ".attn_q." in name or ".attn_k." in name:
                heads = values.unflatten(0, (-1, width // 2, 2))
                self.tensors[name] = heads.transpose(1, 2).flatten(0, 2)

    def block(self, number: int, has_bias: bool) -> Block:
        """Return the weights of a block."""

        def part(name: str) -> Tensor:
            return self.tensors[f"blk.{number}.{name}"]

        weights = {
            "before_attention": part("attn_norm.weight"),
            "qkv": torch.cat([part(f"attn_{letter}.weight") for letter in "qkv"]),
            "out": part("attn_output.weight"),
            "before_mlp": part("ffn_norm.weight"),
            "gate_up": torch.cat([part(f"ffn_{name}.weight") for name in ("gate", "up")]),
            "down": part("ffn_down.weight"),
        }
        if has_bias:
            weights["bias"] = torch.cat([part(f"attn_{letter}.bias") for letter in "qkv"])
        return weights


class Target:
    """A model's de-quantised weights, and its forward.

    Attributes:
        heads, groups: numbers of attention heads, and of those of keys and values.
        size, width, inner: widths of states, of a head and of the MLPs.
        embed, norm, head: the embedding, the last norm and the LM head.
        blocks: the weights of each block.
        is_biased: whether queries, keys and values have biases.
    """

    def __init__(self, path: Path, device: str) -> None:
        weights = Weights(path, device)
        self.heads = int(weights.fact("attention.head_count"))
        self.groups = int(weights.fact("attention.head_count_kv"))
        self.eps = float(weights.fact("attention.layer_norm_rms_epsilon"))
        self.theta = float(weights.fact("rope.freq_base"))
        self.inner = int(weights.fact("feed_forward_length"))
        self.embed = weights.tensors["token_embd.weight"]
        self.norm = weights.tensors["output_norm.weight"]
        self.head = weights.tensors.get("output.weight", self.embed)
        self.size = self.embed.shape[1]
        self.width = self.size // self.heads
        weights.order_rotated(self.width)
        self.is_biased = "blk.0.attn_q.bias" in weights.tensors
        count = int(weights.fact("block_count"))
        self.blocks = [weights.block(number, self.is_biased) for number in range(count)]
        self.device = self.embed.device
        powers = torch.arange(0, self.width, 2, device=device).float() / self.width
        angles = torch.arange(POSITIONS, device=device)[:, None] * self.theta**-powers
        self.cos = angles.cos().repeat(1, 2).bfloat16()
        self.sin = angles.sin().repeat(1, 2).bfloat16()

    def forward(
        self, tokens: Tensor, positions: Tensor, attend: Attend, lower: list[Tensor] | None = None
    ) -> Tensor:
        """Return the LM head's inputs [B, T, d].

        Args:
            tokens: [B, T].
            positions: [B or 1, T].
            attend: mixes the values of a block.
            lower: gets what the blocks at a quarter and at half of the depth read, at a size of 1.
        """
        x = self.embed[tokens]
        cos = self.cos[positions][:, None]
        sin = self.sin[positions][:, None]

        def rotated(heads: Tensor) -> Tensor:
            low, high = heads.chunk(2, -1)
            return heads * cos + torch.cat([-high, low], -1) * sin

        for number, block in enumerate(self.blocks):
            if lower is not None and number in (len(self.blocks) // 4, len(self.blocks) // 2):
                lower.append(functional.rms_norm(x, (self.size,)))
            y = functional.rms_norm(x, (self.size,), block["before_attention"], self.eps)
            parts = functional.linear(y, block["qkv"], block.get("bias"))
            parts = parts.unflatten(-1, (-1, self.width)).transpose(1, 2)
            q, k, v = parts.split([self.heads, self.groups, self.groups], 1)
            mixed = attend(number, rotated(q), rotated(k), v)
            x = x + functional.linear(mixed.transpose(1, 2).flatten(2), block["out"])
            y = functional.rms_norm(x, (self.size,), block["before_mlp"], self.eps)
            gate, up = functional.linear(y, block["gate_up"]).chunk(2, -1)
            x = x + functional.linear(functional.silu(gate).mul_(up), block["down"])
        return functional.rms_norm(x, (self.size,), self.norm, self.eps)

    @torch.inference_mode()
    def read(
        self, tokens: Tensor, keep: Keep | None = None, lower: list[Tensor] | None = None
    ) -> Tensor:
        """Return the states [B, T, d] of texts [B, T].

        Args:
            tokens: the texts.
            keep: gets the keys and values of each block.
            lower: gets the states of two lower blocks.
        """

        def attend(block: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if keep is not None:
                keep(block, k, v)
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        positions = torch.arange(tokens.shape[1], device=self.device)[None]
        return self.forward(tokens, positions, attend, lower)

    @torch.inference_mode()
    def law(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the likeliest tokens [n] after states [n, d], and log-sum-exps [n] of logits."""
        best = []
        whole = []
        for part in states.split(LOGITS):
            logits = product(part, self.head)
            best.append(logits.argmax(-1).int())
            whole.append(logits.logsumexp(-1))
        return torch.cat(best), torch.cat(whole)

    def sample(self, states: Tensor, temperatures: Tensor, least: float) -> Tensor:
        """Return a token [n] after each state [n, d].

        A token less likely than `least` times the likeliest is not drawn. A temperature of 0 draws
        the likeliest token, or one as near to it as rounding.
        """
        logits = product(states, self.head)
        if least:
            logits.masked_fill_(logits < logits.amax(-1, keepdim=True) + log(least), -torch.inf)
        noise = torch.empty_like(logits).exponential_().log_()
        return logits.div_(temperatures.clamp(min=COLDEST)[:, None]).sub_(noise).argmax(-1)

    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        temperatures: Sequence[float],
        limit: int,
        stops: Sequence[int],
        *,
        rows: int = 2048,
        least: float = 0.0,
    ) -> list[list[int]]:
        """Return an answer to each prompt, with the stop token that ended it.

        Args:
            prompts: their tokens.
            temperatures: one for each prompt.
            limit: the most tokens of an answer.
            stops: the tokens that end an answer.
            rows: how many prompts are answered together.
            least: a token is not drawn if it is less likely than this share of the likeliest.
        """
        answers: list[list[int]] = [[] for _ in prompts]
        order = sorted(range(len(prompts)), key=lambda number: len(prompts[number]))
        for start in range(0, len(order), rows):
            chosen = order[start : start + rows]
            wave = Wave(self, [prompts[number] for number in chosen], limit)
            heat = torch.tensor([temperatures[number] for number in chosen], device=self.device)
            for number, answer in zip(chosen, wave.answers(heat, stops, least), strict=True):
                answers[number] = answer
        return answers


class Wave:
    """Prompts that are answered together.

    Attributes:
        caches: keys and values [R, G, T, D] of each block.
        places: [R] where the next token of each row stands.
        longest: tokens of the longest prompt.
    """

    def __init__(self, target: Target, prompts: list[Sequence[int]], limit: int) -> None:
        self.target = target
        self.prompts = prompts
        self.limit = limit
        self.device = target.device
        self.places = torch.tensor([len(prompt) for prompt in prompts], device=self.device)
        self.longest = int(self.places.max())
        width = -(-(self.longest + limit) // SWEEP) * SWEEP
        shape = len(prompts), target.groups, width, target.width
        self.caches: list[tuple[Tensor, Tensor]] = []
        for _ in target.blocks:
            keys = torch.zeros(shape, dtype=torch.bfloat16, device=self.device)
            self.caches.append((keys, torch.zeros_like(keys)))

    def answers(self, temperatures: Tensor, stops: Sequence[int], least: float) -> list[list[int]]:
        """Return the answers to all prompts."""
        count = len(self.prompts)
        ends = torch.tensor(stops, device=self.device)
        rows = torch.arange(count, device=self.device)  # of `said`
        said = torch.full((count, self.limit), -1, device=self.device)
        is_done = torch.zeros(count, dtype=torch.bool, device=self.device)
        token = self.target.sample(self._read_prompts(), temperatures, least)
        for step in range(self.limit):
            said[rows, step] = token
            is_done |= torch.isin(token, ends)
            if step == self.limit - 1:
                break
            if step % SWEEP == SWEEP - 1:
                left = (~is_done).nonzero()[:, 0]
                if not len(left):
                    break
                if len(left) < len(rows):
                    rows = rows[left]
                    token = token[left]
                    temperatures = temperatures[left]
                    is_done = is_done[left]
                    self._keep(left)
            states = self._next(token, self.longest + step + 1)
            token = self.target.sample(states, temperatures, least)
            self.places = self.places + 1
        return [_until_stop(numbers, stops, self.limit) for numbers in said.tolist()]

    def _read_prompts(self) -> Tensor:
        """Read all prompts, and return the states [R, d] of their last tokens."""
        longest = self.longest
        padded = [[*prompt, *[0] * (longest - len(prompt))] for prompt in self.prompts]
        tokens = torch.tensor(padded, device=self.device)
        rows = torch.arange(len(padded), device=self.device)
        states = []
        for part in rows.split(max(1, PART // longest)):

            def keep(block: int, k: Tensor, v: Tensor, part: Tensor = part) -> None:
                for cache, new in zip(self.caches[block], (k, v), strict=True):
                    cache[part, :, :longest] = new

            read = self.target.read(tokens[part], keep)
            lasts = self.places[part] - 1
            states.append(read[torch.arange(len(part), device=self.device), lasts])
        return torch.cat(states)

    def _keep(self, left: Tensor) -> None:
        """Keep only some rows."""
        self.places = self.places[left]
        self.caches = [(keys[left], values[left]) for keys, values in self.caches]

    def _next(self, tokens: Tensor, most: int) -> Tensor:
        """Return the states [R, d] of one token of each row; all stand below `most`."""
        target = self.target
        places = self.places
        most = -(-most // SWEEP) * SWEEP
        rows = torch.arange(len(tokens), device=self.device)
        seen = (torch.arange(most, device=self.device) <= places[:, None])[:, None, None]

        def attend(block: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            for cache, new in zip(self.caches[block], (k, v), strict=True):
                cache[rows, :, places] = new[:, :, 0]
            keys, values = (cache[:, :, :most] for cache in self.caches[block])
            # The queries of a group are rows of one product.
            queries = q.unflatten(1, (target.groups, -1)).squeeze(3)
            mask = seen.expand(-1, target.groups, queries.shape[2], -1)
            mixed = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
            return mixed.flatten(1, 2).unsqueeze(2)

        return target.forward(tokens[:, None], places[:, None], attend)[:, 0]


def _until_stop(numbers: list[int], stops: Sequence[int], limit: int) -> list[int]:
    """Return an answer up to its stop token, without the places that it did not reach."""
    end = next(
        (place for place, token in enumerate(numbers) if token in stops or token < 0), limit - 1
    )
    return [token for token in numbers[: end + 1] if token >= 0]
