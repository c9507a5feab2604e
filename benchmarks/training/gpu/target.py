"""Qwen2 or Llama in plain torch and bfloat16, from a GGUF file: its states, its laws and its answers, of many rows at
once."""

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

Attend = Callable[
    [int, Tensor, Tensor, Tensor], Tensor
]  # block, queries, keys and values [B, H or G, T, D]: mixed
PART = 65_536  # positions of a forward
LOGITS = 8192  # positions whose logits exist at a time
SWEEP = 16  # decoded tokens after which finished rows leave


def product(x: Tensor, matrix: Tensor) -> Tensor:
    """Return x @ matrix.T in float32, of bfloat16 values."""
    if x.is_cuda:
        return torch.mm(x, matrix.T, out_dtype=torch.float32)
    return functional.linear(x.float(), matrix.float())


class Target:
    """A model's de-quantised weights, and its forward. `inner` is the width of its MLPs."""

    def __init__(self, path: Path, device: str) -> None:
        reader = GGUFReader(path)
        architecture = reader.fields["general.architecture"].contents()

        def given(name: str) -> Any:
            return reader.fields[f"{architecture}.{name}"].contents()

        self.heads, self.groups = (
            int(given("attention.head_count")),
            int(given("attention.head_count_kv")),
        )
        self.eps, self.theta = (
            float(given("attention.layer_norm_rms_epsilon")),
            float(given("rope.freq_base")),
        )
        self.inner = int(given("feed_forward_length"))

        def load(each: Any) -> Tensor:
            return (
                torch.from_numpy(np.array(dequantize(each.data, each.tensor_type)))
                .bfloat16()
                .to(device)
            )

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            loaded = list(pool.map(load, reader.tensors))
        tensors = {each.name: tensor for each, tensor in zip(reader.tensors, loaded, strict=True)}
        self.embed, self.norm = tensors["token_embd.weight"], tensors["output_norm.weight"]
        self.head = tensors.get("output.weight", self.embed)
        self.size = self.embed.shape[1]
        self.width = self.size // self.heads
        if architecture == "llama":
            for name in tensors:
                if (
                    ".attn_q." in name or ".attn_k." in name
                ):  # rows that turn together stand beside each other
                    tensors[name] = (
                        tensors[name]
                        .unflatten(0, (-1, self.width // 2, 2))
                        .transpose(1, 2)
                        .flatten(0, 2)
                    )
        self.blocks = [
            {
                "before_attention": tensors[f"blk.{n}.attn_norm.weight"],
                "qkv": torch.cat([tensors[f"blk.{n}.attn_{each}.weight"] for each in "qkv"]),
                "out": tensors[f"blk.{n}.attn_output.weight"],
                "before_mlp": tensors[f"blk.{n}.ffn_norm.weight"],
                "gate_up": torch.cat(
                    [tensors[f"blk.{n}.ffn_{each}.weight"] for each in ("gate", "up")]
                ),
                "down": tensors[f"blk.{n}.ffn_down.weight"],
            }
            for n in range(int(given("block_count")))
        ]
        self.is_biased = "blk.0.attn_q.bias" in tensors
        if self.is_biased:
            for n, block in enumerate(self.blocks):
                block["bias"] = torch.cat([tensors[f"blk.{n}.attn_{each}.bias"] for each in "qkv"])
        self.device = self.embed.device
        frequencies = self.theta ** (
            -torch.arange(0, self.width, 2, device=device).float() / self.width
        )
        angles = torch.arange(4096, device=device)[:, None] * frequencies
        self.cos, self.sin = (
            torch.cat([each, each], -1).bfloat16() for each in (angles.cos(), angles.sin())
        )

    def forward(
        self, tokens: Tensor, positions: Tensor, attend: Attend, lower: list[Tensor] | None = None
    ) -> Tensor:
        """Return the LM head's inputs [B, T, d] of tokens [B, T] at positions [B or 1, T]. `lower` gets what the blocks
        at a quarter and at half of the depth read, at a size of 1."""
        x = self.embed[tokens]
        cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]

        def rotated(each: Tensor) -> Tensor:
            low, high = each.chunk(2, -1)
            return each * cos + torch.cat([-high, low], -1) * sin

        for n, block in enumerate(self.blocks):
            if lower is not None and n in (len(self.blocks) // 4, len(self.blocks) // 2):
                lower.append(functional.rms_norm(x, (self.size,)))
            y = functional.rms_norm(x, (self.size,), block["before_attention"], self.eps)
            parts = (
                functional.linear(y, block["qkv"], block.get("bias"))
                .unflatten(-1, (-1, self.width))
                .transpose(1, 2)
            )
            q, k, v = parts.split([self.heads, self.groups, self.groups], 1)
            mixed = attend(n, rotated(q), rotated(k), v)
            x = x + functional.linear(mixed.transpose(1, 2).flatten(2), block["out"])
            y = functional.rms_norm(x, (self.size,), block["before_mlp"], self.eps)
            gate, up = functional.linear(y, block["gate_up"]).chunk(2, -1)
            x = x + functional.linear(functional.silu(gate).mul_(up), block["down"])
        return functional.rms_norm(x, (self.size,), self.norm, self.eps)

    @torch.inference_mode()
    def read(
        self,
        tokens: Tensor,
        keep: Callable[[int, Tensor, Tensor], None] | None = None,
        lower: list[Tensor] | None = None,
    ) -> Tensor:
        """Return the states [B, T, d] of texts [B, T]; `keep` gets the keys and values of each block, and `lower` the
        states of two lower blocks."""

        def attend(block: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if keep is not None:
                keep(block, k, v)
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        return self.forward(
            tokens, torch.arange(tokens.shape[1], device=self.device)[None], attend, lower
        )

    @torch.inference_mode()
    def law(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the likeliest tokens [n] behind states [n, d] and the logarithms of the sums that divide [n]."""
        best, whole = [], []
        for part in states.split(LOGITS):
            logits = product(part, self.head)
            best.append(logits.argmax(-1).int())
            whole.append(logits.logsumexp(-1))
        return torch.cat(best), torch.cat(whole)

    def sample(self, states: Tensor, temperatures: Tensor, least: float) -> Tensor:
        """Return a token [n] behind each state [n, d]. One less likely than `least` times the likeliest is not drawn; a
        temperature of 0 draws the likeliest, or one as near to it as rounding."""
        logits = product(states, self.head)
        if least:
            logits.masked_fill_(logits < logits.amax(-1, keepdim=True) + log(least), -torch.inf)
        noise = torch.empty_like(logits).exponential_().log_()
        return logits.div_(temperatures.clamp(min=1e-4)[:, None]).sub_(noise).argmax(-1)

    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        temperatures: Sequence[float],
        limit: int,
        stops: Sequence[int],
        rows: int = 2048,
        least: float = 0.0,
    ) -> list[list[int]]:
        """Return an answer to each prompt, with the stop token that ended it, of at most `limit` tokens."""
        found: list[list[int]] = [[] for _ in prompts]
        order = sorted(range(len(prompts)), key=lambda number: len(prompts[number]))
        for start in range(0, len(order), rows):
            chosen = order[start : start + rows]
            own = [prompts[each] for each in chosen], [temperatures[each] for each in chosen]
            for each, answer in zip(chosen, self._wave(*own, limit, stops, least), strict=True):
                found[each] = answer
        return found

    def _wave(
        self,
        prompts: list[Sequence[int]],
        temperatures: list[float],
        limit: int,
        stops: Sequence[int],
        least: float,
    ) -> list[list[int]]:
        lengths = torch.tensor([len(each) for each in prompts], device=self.device)
        longest, count = int(lengths.max()), len(prompts)
        width = -(-(longest + limit) // SWEEP) * SWEEP
        tokens = torch.tensor(
            [[*each, *[0] * (longest - len(each))] for each in prompts], device=self.device
        )
        warmth = torch.tensor(temperatures, device=self.device)
        shape = count, self.groups, width, self.width
        caches = [
            [torch.zeros(shape, dtype=torch.bfloat16, device=self.device) for _ in "kv"]
            for _ in self.blocks
        ]
        firsts = []
        for part in torch.arange(count, device=self.device).split(max(1, PART // longest)):

            def keep(block: int, k: Tensor, v: Tensor, part: Tensor = part) -> None:
                for cache, new in zip(caches[block], (k, v), strict=True):
                    cache[part, :, :longest] = new

            states = self.read(tokens[part], keep)
            firsts.append(states[torch.arange(len(part), device=self.device), lengths[part] - 1])
        token = self.sample(torch.cat(firsts), warmth, least)
        said = torch.full((count, limit), -1, device=self.device)
        ends, row, place = (
            torch.tensor(stops, device=self.device),
            torch.arange(count, device=self.device),
            lengths,
        )
        is_done = torch.zeros(count, dtype=torch.bool, device=self.device)
        for step in range(limit):
            said[row, step] = token
            is_done |= torch.isin(token, ends)
            if step % SWEEP == SWEEP - 1 or step == limit - 1:
                left = (~is_done).nonzero()[:, 0]
                if not len(left) or step == limit - 1:
                    break
                if len(left) < len(row):
                    row, place, token, warmth, is_done = (
                        each[left] for each in (row, place, token, warmth, is_done)
                    )
                    caches = [[cache[left] for cache in both] for both in caches]
            token = self.sample(self._next(token, place, caches, longest + step + 1), warmth, least)
            place = place + 1
        answers = []
        for numbers in said.tolist():
            end = next(
                (at for at, each in enumerate(numbers) if each in stops or each < 0), limit - 1
            )
            answers.append([each for each in numbers[: end + 1] if each >= 0])
        return answers

    def _next(
        self, tokens: Tensor, places: Tensor, caches: list[list[Tensor]], most: int
    ) -> Tensor:
        """Return the states [n, d] of one token of each row, which stands at `places` [n], below `most`."""
        most = -(-most // SWEEP) * SWEEP
        count = torch.arange(len(tokens), device=self.device)
        seen = (torch.arange(most, device=self.device) <= places[:, None])[:, None, None]

        def attend(block: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            for cache, new in zip(caches[block], (k, v), strict=True):
                cache[count, :, places] = new[:, :, 0]
            keys, values = (cache[:, :, :most] for cache in caches[block])
            # The queries of a group are rows of one product.
            asked = q.unflatten(1, (self.groups, -1)).squeeze(3)
            mask = seen.expand(-1, self.groups, asked.shape[2], -1)
            mixed = functional.scaled_dot_product_attention(asked, keys, values, attn_mask=mask)
            return mixed.flatten(1, 2).unsqueeze(2)

        return self.forward(tokens[:, None], places[:, None], attend)[:, 0]
