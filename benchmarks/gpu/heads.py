"""Makes a target's heads on one GPU: answers, the target's states, the head of the package, an EAGLE-like one of the
same size, steps and data, and short runs that change one thing each, with three seeds.

    python -m benchmarks.gpu.heads --requests requests.jsonl --held PROMPTS... --out OUT [--target smollm2]

With answers in OUT/chats (`train_heads.sh` unpacks those in git) it needs no requests. A run that was stopped goes on:
answers and heads' checkpoints are kept in OUT, and on a CPU the states too; a GPU computes them anew. OUT/log.jsonl has
the curves. `python -m benchmarks.gpu.finish OUT/lyanna OUT/chats --out lyanna` calibrates a head afterwards, on a CPU.
`--device cpu` is for a `--sample` of conversations and small steps (docs/training.md).
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from math import log
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from benchmarks.chat.data import Question, apart
from benchmarks.gpu import answers
from benchmarks.gpu.target import LOGITS, PART, Target, product
from forerun.api.loading import load_tokenizer
from forerun.backends.hot import hot_tokens
from forerun.bench.datasets import read_prompts
from forerun.heads.heads import HEAD_KINDS, HeadLayer, HiddenConfig, HiddenDrafter
from forerun.train.loop import claim, load_checkpoint, save_checkpoint
from forerun.train.texts import Conversation, read_chats
from forerun.zoo import MODELS, QWEN_CODER, SMOLLM2, hot_folder, require

LIMIT = 320  # tokens of an answer
HOT, RANK, INNER = 16_384, 64, 2048
BATCH = 16_384  # positions of a step
PROMPTS = 0.25  # share of the prompts' positions that count
MUON, ADAM, DECAY = 2e-3, 4e-3, 0.05
WARMUP, COOLDOWN = 20, 0.7  # steps; share of the steps
PLACES = 4  # that are measured


@dataclass(frozen=True)
class Form:
    """A head and how it is trained."""

    kind: str = "lyanna"
    hot: int = HOT
    rank: int = RANK
    inner: int = INNER  # neurons, at most the target's
    unroll: int = 4
    reads_lower: bool = (
        False  # the first step sees states of two lower blocks, as EAGLE-3 (arXiv 2503.01840) does
    )
    copied: bool = True  # begins as least squares' map and the target's last layer
    reads_token: bool = True  # the first step sees the token that follows
    law: bool = True  # the loss is with the target's law, not with its likeliest token
    batch: int = BATCH
    seed: int = 0


MAIN = Form()
SHORT = {
    "as it is": MAIN,
    "no token in the first step": replace(MAIN, reads_token=False),
    "no token information": replace(MAIN, rank=0),
    "likeliest token": replace(MAIN, law=False),
    "8,192 hot tokens": replace(MAIN, hot=8192),
    "unrolled once": replace(MAIN, unroll=1),
    "no map and no copied layer": replace(MAIN, copied=False),
    "EAGLE-like": replace(MAIN, kind="eagle"),
    "states of three layers": replace(MAIN, reads_lower=True),
    "1,024 neurons": replace(MAIN, inner=INNER // 2),
}


class Batch(NamedTuple):
    """Rows of texts: each position's place in Data's tensors [B, T], whether it is within the text, and whether it is
    an answer's."""

    at: Tensor
    within: Tensor
    answers: Tensor


class Data:
    """Texts with the target's states. `whole` [n] is the log-sum-exp of the logits of a state, `best` [n] its likeliest
    token, `lower` [n, 2 d] the states of two lower blocks, if wanted. They are read once if `kept` names a file for
    them; `part` positions are read or measured together."""

    def __init__(
        self,
        target: Target,
        known: list[Conversation],
        part: int = PART,
        kept: Path | None = None,
        lower: bool = False,
    ) -> None:
        rows = [(each.prompt + each.answer)[:-1] for each in known]
        device, self.part = target.device, part
        self.sources = [each.source for each in known]
        self.lengths = torch.tensor([len(each) for each in rows])
        self.sizes, self.starts = (
            self.lengths.to(device),
            (self.lengths.cumsum(0) - self.lengths).to(device),
        )
        self.begins = torch.tensor([len(each.prompt) - 1 for each in known], device=device)
        self.tokens = torch.tensor([token for row in rows for token in row], device=device)
        total = len(self.tokens)
        self.states = torch.empty(total, target.size, dtype=torch.bfloat16, device=device)
        self.lower = torch.empty(
            total if lower else 0, 2 * target.size, dtype=torch.bfloat16, device=device
        )
        self.whole, self.best = (
            torch.empty(total, device=device),
            torch.empty(total, dtype=torch.int32, device=device),
        )
        names = ("states", "best", "whole", "lower")
        if kept is not None and kept.exists():
            parts = load_file(kept)
            if len(parts["lower"]) >= len(self.lower):
                self.states, self.best, self.whole, self.lower = (parts[name] for name in names)
                return

        def read(some: list[int]) -> None:
            at, within, _ = self.take(some)
            below: list[Tensor] = []
            states = target.read(self.tokens[at], lower=below if lower else None)[within]
            best, whole = target.law(states)
            chosen = at[within]
            if lower:
                self.lower[chosen] = torch.cat(below, -1)[within]
            self.states[chosen], self.best[chosen], self.whole[chosen] = states, best, whole

        # On a CPU several threads of one core each read, which do not wait at barriers.
        threads = torch.get_num_threads()
        torch.set_num_threads(1 if device.type == "cpu" else threads)
        with ThreadPoolExecutor(threads if device.type == "cpu" else 1) as pool:
            list(pool.map(read, self.batches(part, random.Random(0))))
        torch.set_num_threads(threads)
        if kept is not None:
            save_file({name: getattr(self, name) for name in names}, kept)

    def batches(self, positions: int, rng: random.Random) -> list[list[int]]:
        """Return all rows in batches of about the same length, shuffled."""
        found: list[list[int]] = [[]]
        noisy = sorted(
            range(len(self.lengths)), key=lambda row: int(self.lengths[row]) + rng.random() * 24
        )
        longest = 0
        for row in noisy:
            longest = max(longest, int(self.lengths[row]))
            if found[-1] and (len(found[-1]) + 1) * longest > positions:
                found.append([])
                longest = int(self.lengths[row])
            found[-1].append(row)
        rng.shuffle(found)
        return found

    def take(self, rows: list[int]) -> Batch:
        own = torch.tensor(rows, device=self.starts.device)
        at = torch.arange(int(self.lengths[rows].max()), device=self.starts.device)
        within = at < self.sizes[own][:, None]
        return Batch(
            self.starts[own][:, None] + at * within,
            within,
            within & (at >= self.begins[own][:, None]),
        )


class Starts:
    """What heads begin with, made once for all."""

    def __init__(self, name: str, target: Target, data: Data, batch: int, hot: int) -> None:
        vocabulary = len(target.embed)
        at = torch.arange(int(data.lengths.max()), device=target.device)
        is_answer = (at >= data.begins[:, None])[
            at < data.sizes[:, None]
        ]  # of all positions in turn
        counts = torch.bincount(data.tokens, torch.where(is_answer, 1.0, 0.3), vocabulary).cpu()
        known = hot_tokens(cast(Path, hot_folder(MODELS[name].draft or name)), None, vocabulary)
        assert known is not None
        counts[known] += torch.linspace(2, 0, len(known))  # the draft's own order, for rare ones
        self.hot = counts.argsort(descending=True, stable=True)[:hot].to(target.device)
        self.number = torch.full((vocabulary,), -1, device=target.device)
        self.number[self.hot] = torch.arange(hot, device=target.device)
        self.embed, self.answer = self._bigrams(data, vocabulary, 2 * batch)
        self.fuse = {reads: self._linear(target, data, reads) for reads in (True, False)}
        self.deeper = self._linear(target, data, True, data.lower) if len(data.lower) else None

    def _bigrams(self, data: Data, vocabulary: int, size: int) -> tuple[Tensor, Tensor]:
        """Fit a model of the next hot token by the last one: its states [V, r] and its weight [S, r], at 0.4 of its
        size, as the states know most of it."""
        device, steps = data.tokens.device, min(400, 3 * len(data.tokens) // size + 1)
        torch.manual_seed(0)
        embed = torch.randn(vocabulary, RANK, device=device, requires_grad=True)
        weight = torch.zeros(len(self.hot), RANK, device=device, requires_grad=True)
        optimizer = torch.optim.Adam([{"params": [embed]}, {"params": [weight]}], betas=(0.9, 0.95))
        is_last = torch.zeros(len(data.tokens), dtype=torch.bool, device=device)
        is_last[data.starts + data.sizes - 1] = True
        following = self.number[data.tokens.roll(-1)]
        chosen = (~is_last & (following >= 0)).nonzero()[:, 0]
        for step in range(steps):
            for group, rate in zip(optimizer.param_groups, (0.05, 0.01), strict=True):
                group["lr"] = rate * min(
                    1, (step + 1) / min(30, 1 + steps // 5), (1 - step / steps) / 0.7
                )
            at = chosen[torch.randint(len(chosen), (size,), device=device)]
            with torch.autocast(device.type, torch.bfloat16):
                logits = functional.linear(
                    functional.rms_norm(embed[data.tokens[at]], (RANK,)), weight
                )
            optimizer.zero_grad()
            functional.cross_entropy(logits.float(), following[at]).backward()
            optimizer.step()
        return functional.rms_norm(embed.detach(), (RANK,)), 0.4 * weight.detach()

    def _linear(
        self, target: Target, data: Data, reads_token: bool, lower: Tensor | None = None
    ) -> Tensor:
        """Return least squares' map [d, 2 d] from a state and the next token's embedding, or from the state alone, to
        the next state; [d, 4 d] with lower states."""
        size, gain = target.size, target.norm.float().clamp(min=0.1)
        reads = (2 if lower is None else 4) * size
        both, wanted = (torch.zeros(reads, width, device=target.device) for width in (reads, size))
        for rows in data.batches(16_384, random.Random(1))[:24]:
            at, within, _ = data.take(rows)
            states, seen = data.states[at].float(), within[:, 1:]
            after = functional.rms_norm(target.embed[data.tokens[at][:, 1:]].float(), (size,))
            x = torch.cat([states[:, :-1], after * reads_token], -1)[seen]
            if lower is not None:
                x = torch.cat([x, lower[at[:, :-1]][seen].float()], -1)
            both += x.T @ x
            wanted += x.T @ (states[:, 1:] / gain)[seen]
        both.diagonal().add_(3e-3 * both.diagonal().mean())
        return torch.linalg.solve(both, wanted).T


class Deeper(HiddenDrafter):
    """A Lyanna head whose first step adds `more` of the states `lower` [B, T, 2 d] of two lower blocks: only tried."""

    lower: Tensor

    def __init__(self, config: HiddenConfig) -> None:
        super().__init__(config)
        self.more = torch.nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)

    def fused(self, states: Tensor, embedded: Tensor | None = None) -> Tensor:
        x = super().fused(states, embedded)
        return x if embedded is None else x + self.more(self.lower)


def begin(target: Target, starts: Starts, form: Form) -> HiddenDrafter:
    """Return a head. A copied one begins as least squares' map; its layers are the target's last, whose output does not
    count yet."""
    inner, table = min(form.inner, target.inner), RANK * (len(target.embed) + form.hot)
    if form.kind == "eagle":  # the same size: more neurons in place of token information
        inner += round(table / (3 * target.size * 32)) * 32
    config = HiddenConfig(
        kind=form.kind,
        hidden_size=target.size,
        intermediate_size=inner,
        num_attention_heads=target.heads,
        num_key_value_heads=target.groups,
        head_dim=target.width,
        rope_theta=target.theta,
        rms_norm_eps=target.eps,
        rank=form.rank,
        bias=target.is_biased,
        vocab_size=len(target.embed),
        hot_size=form.hot,
        states=form.unroll,
        max_position_embeddings=32768,
    )
    torch.manual_seed(form.seed)
    head = (Deeper if form.reads_lower else HiddenDrafter)(config)
    head.begin()
    head.to(target.device)
    head.hot.copy_(starts.hot[: form.hot])
    last = target.blocks[-1]
    with torch.no_grad():
        if head.informed:
            head.embed.weight.copy_(starts.embed)
            head.answer.weight.copy_(starts.answer[: form.hot])
        head.norm.weight.copy_(target.norm.clamp(min=0.1))
        if not form.copied:
            return head
        head.fuse.weight.copy_(starts.fuse[form.reads_token])
        if isinstance(head, Deeper):
            assert starts.deeper is not None
            fuse, more = starts.deeper.split(2 * target.size, 1)
            head.fuse.weight.copy_(fuse)
            head.more.weight.copy_(more)
        gate, up = last["gate_up"].float().chunk(2)
        kept = (
            (gate.norm(dim=1) * up.norm(dim=1) * last["down"].float().norm(dim=0))
            .topk(min(inner, len(gate)))
            .indices
        )
        layer = cast(HeadLayer, head.layers[0])
        layer.qkv.weight.copy_(last["qkv"])
        if target.is_biased:
            layer.qkv.bias.copy_(last["bias"])
        layer.gate_up.weight[: len(kept)] = gate[kept]
        layer.gate_up.weight[inner : inner + len(kept)] = up[kept]
        layer.before_attention.weight.copy_(last["before_attention"])
        layer.before_mlp.weight.copy_(last["before_mlp"])
    return head


class Compared(torch.autograd.Function):
    """The mean cross-entropy of drafts with the target's laws over the hot set. Logits exist for LOGITS places at a
    time; the LM head is frozen. `own` is the target's states [n, d], whose laws have the log-sum-exp `whole` [n], or
    the numbers [n] of its likeliest tokens in the hot set, -1 for one that is not in it."""

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        said: Tensor,
        answer: Tensor,
        lm: Tensor,
        own: Tensor,
        whole: Tensor,
    ) -> Tensor:
        rank = said.shape[1]
        matrix, x = torch.cat([lm, answer.bfloat16()], 1), torch.cat([states, said], 1).bfloat16()
        by_x, by_answer = torch.empty_like(x), torch.zeros_like(answer)
        total, weight = states.new_zeros(()), 1 / max(1, len(x))
        for part in torch.arange(len(x), device=x.device).split(LOGITS):
            law = product(x[part], matrix).log_softmax(-1)
            # Both laws count `weight` from the start, as a pass over all logits takes long.
            if own.ndim == 2:
                wanted = product(own[part], lm).sub_(whole[part, None] - log(weight)).exp_()
            else:
                wanted = torch.zeros_like(law)
                wanted.scatter_(
                    1, own[part, None].clamp(min=0), (own[part, None] >= 0).float() * weight
                )
            mass = wanted.sum(-1, keepdim=True)
            total -= (wanted * law).sum()
            slope = law.add_(mass.log()).exp_().sub_(wanted).bfloat16()
            by_x[part] = slope @ matrix
            if rank:
                by_answer += (slope.T @ x[part, -rank:]).float()
        ctx.save_for_backward(by_x, by_answer)
        ctx.rank = rank
        return total

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> Any:
        by_x, by_answer = ctx.saved_tensors
        size = by_x.shape[1] - ctx.rank
        slope = slopes[0]
        return (
            by_x[:, :size].float() * slope,
            by_x[:, size:].float() * slope,
            by_answer * slope,
            None,
            None,
            None,
        )


class Trainer:
    """A head with what its loss needs."""

    def __init__(self, name: str, form: Form, target: Target, starts: Starts, log: Path) -> None:
        self.name, self.form, self.embed, self.log = name, form, target.embed, log
        self.head = begin(target, starts, form)
        self.lm = target.head[self.head.hot].contiguous()
        self.number = torch.where(starts.number < form.hot, starts.number, -1)
        self.none = torch.zeros(form.hot, 0, device=target.device)

    def drafts(self, data: Data, at: Tensor, steps: int) -> list[Tensor]:
        with torch.autocast(at.device.type, torch.bfloat16):
            embedded = self.embed[data.tokens[at]].float()
            if isinstance(self.head, Deeper):
                self.head.lower = data.lower[at].float()
            return self.head.drafted(
                data.states[at].float(), embedded * self.form.reads_token, steps
            )

    def token_states(self, tokens: Tensor) -> Tensor:
        return (
            self.head.token_states(tokens)
            if self.head.informed
            else self.none[:1].expand(len(tokens), 0)
        )

    def loss(self, data: Data, batch: Batch) -> Tensor:
        """Return the losses of the places [K]."""
        at, within, answers = batch
        chosen = answers | within & (torch.rand(answers.shape, device=at.device) < PROMPTS)
        answer, losses = self.head.answer.weight if self.head.informed else self.none, []
        for k, states in enumerate(self.drafts(data, at, self.form.unroll), 1):
            text, place = chosen[:, k:].nonzero(as_tuple=True)
            source = at[text, place + k]
            own = data.states[source] if self.form.law else self.number[data.best[source].long()]
            said = self.token_states(data.tokens[source])
            losses.append(
                Compared.apply(
                    states[text, place].float(), said, answer, self.lm, own, data.whole[source]
                )
            )
        return torch.stack(losses)

    @torch.no_grad()
    def measure(self, data: Data) -> tuple[dict[str, list[float]], dict[str, list[int]]]:
        """Return for each source of questions the shares of greedy drafts that the target accepts at places 1, 2, ...
        after those before were accepted, and of how many."""
        names = sorted(set(data.sources))
        hits, cases = torch.zeros(2, len(names), PLACES, device=data.tokens.device).unbind(0)
        kinds = torch.tensor(
            [names.index(each) for each in data.sources], device=data.tokens.device
        )
        for rows in data.batches(data.part, random.Random(0)):
            at, within, answers = data.take(rows)
            best = data.best[at].long()
            kept = functional.pad(best[:, :-1] == data.tokens[at][:, 1:], (0, 1))
            live = answers[:, :-PLACES] & within[:, PLACES:]
            length, kind = live.shape[1], kinds[torch.tensor(rows, device=at.device)]
            for k, states in enumerate(self.drafts(data, at, PLACES), 1):
                text, place = live.nonzero(as_tuple=True)
                logits = product(states[text, place].bfloat16(), self.lm)
                if self.head.informed:
                    logits += self.head.token_information(data.tokens[at[text, place + k]])
                hit = self.head.hot[logits.argmax(-1)] == best[text, place + k]
                hits[:, k - 1].index_add_(0, kind[text], hit.float())
                cases[:, k - 1].index_add_(0, kind[text], torch.ones_like(hit, dtype=torch.float32))
                followed = torch.zeros_like(live)
                followed[text, place] = hit
                live = followed & kept[:, k : k + length]
        shares = [
            [round(share, 4) for share in row] for row in (hits / cases.clamp(min=1)).tolist()
        ]
        return dict(zip(names, shares, strict=True)), dict(
            zip(names, cases.int().tolist(), strict=True)
        )

    def train(self, data: Data, held: Data, steps: int, notes: int) -> None:
        """Train up to `steps` steps, from a checkpoint if there is one, with about `notes` lines in the log."""
        named = dict(self.head.named_parameters())
        inner = [
            n
            for n, each in named.items()
            if each.ndim == 2 and n.split(".")[0] not in ("embed", "answer")
        ]
        optimizers = [
            torch.optim.AdamW(
                [named[n] for n in named if n not in inner],
                ADAM,
                betas=(0.9, 0.95),
                weight_decay=0.0,
            ),
            torch.optim.Muon(
                [named[n] for n in inner], MUON, DECAY, adjust_lr_fn="match_rms_adamw"
            ),
        ]
        checkpoint = self.log.with_name(f"{self.name}-{self.form.seed}.pt")
        first = load_checkpoint(checkpoint, self.head, optimizers) if checkpoint.exists() else 0
        queue, recent, started = self._forever(data), list[Tensor](), time.time()
        positions = sum(int(data.lengths[next(queue)].sum()) for _ in range(first))
        torch.manual_seed(self.form.seed + first)
        for step in range(first, steps):
            rate = max(
                0.01,
                min(1.0, (step + 1) / min(WARMUP, 1 + steps // 5), (1 - step / steps) / COOLDOWN),
            )
            for optimizer, base in zip(optimizers, (ADAM, MUON), strict=True):
                optimizer.param_groups[0]["lr"] = base * rate
                optimizer.zero_grad()
            losses = self.loss(data, data.take(rows := next(queue)))
            losses.mean().backward()
            torch.nn.utils.clip_grad_norm_(named.values(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
            positions += int(data.lengths[rows].sum())
            recent = [*recent[-19:], losses.detach()]
            if (step + 1) % max(1, steps // notes) == 0 or step + 1 == steps:
                save_checkpoint(checkpoint, step + 1, self.head, optimizers)
                self.note(step + 1, positions, time.time() - started, recent, held)

    def note(
        self, step: int, positions: int, seconds: float, recent: list[Tensor], held: Data
    ) -> None:
        losses = [round(each, 3) for each in torch.stack(recent).mean(0).tolist()]
        line = {"run": self.name, "seed": self.form.seed, "step": step, "positions": positions}
        accepted, cases = self.measure(held)
        line |= {
            "seconds": round(seconds, 1),
            "losses": losses,
            "accepted": accepted,
            "cases": cases,
        }
        with self.log.open("a") as log:
            log.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)

    def _forever(self, data: Data) -> Iterator[list[int]]:
        rng = random.Random(self.form.seed)
        while True:
            yield from data.batches(self.form.batch, rng)

    def save(self, out: Path, steps: int) -> None:
        """Save the head in bfloat16, without its calibration."""
        given = {"muon": MUON, "adam": ADAM, "decay": DECAY, "prompts": PROMPTS, "steps": steps}
        self.head.config.recipe = asdict(self.form) | given
        self.head.config.save_pretrained(out)
        tensors = {
            name: each.contiguous() if each.dtype == torch.long else each.bfloat16().contiguous()
            for name, each in self.head.state_dict().items()
        }
        save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})


def sampled(chats: Path, counts: list[int] | None) -> list[list[Conversation]]:
    """Return the conversations to train on and the held-out ones; of each as many as `counts` says, if given, half of
    them the target's own questions and half about code, and none to train on that shares text with a held-out one."""
    train, held = (read_chats(chats, split) for split in ("train", "validation"))
    if counts is None:
        return [train, held]

    def some(known: list[Conversation], count: int) -> list[Conversation]:
        mixed = random.Random(0).sample(known, len(known))
        halves = [
            [each for each in mixed if (each.source == "own") is own] for own in (True, False)
        ]
        return [each for half in halves for each in half[: count // 2]]

    held = some(held, counts[1])
    train, _ = apart(train, [Question(each.question, each.source, each.split) for each in held])
    return [some(train, counts[0]), held]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", choices=(QWEN_CODER, SMOLLM2), default=QWEN_CODER)
    parser.add_argument(
        "--requests", type=Path, help="what is answered, if OUT/chats has no answers yet"
    )
    parser.add_argument(
        "--held", type=Path, nargs="+", help="likewise: prompts that nothing may share text with"
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit", type=int, help="how many requests are read")
    parser.add_argument("--exercises", type=int, default=3072, help="how many are asked for")
    parser.add_argument("--questions", type=int, default=3072, help="how many are asked for")
    parser.add_argument(
        "--steps", type=int, default=1541, help="of the training of each of the two heads"
    )
    parser.add_argument("--short-steps", type=int, default=150, help="of each short run")
    parser.add_argument(
        "--heads",
        nargs="*",
        choices=HEAD_KINDS,
        default=HEAD_KINDS,
        help="that are trained in full",
    )
    parser.add_argument(
        "--until", type=float, default=1e9, help="seconds after which no short run begins"
    )
    parser.add_argument("--batch", type=int, default=BATCH, help="positions of a step")
    parser.add_argument(
        "--part", type=int, default=PART, help="positions that are read or measured together"
    )
    parser.add_argument(
        "--sample", type=int, nargs=2, help="conversations to train on and held-out ones, of all"
    )
    parser.add_argument(
        "--notes", type=int, default=6, help="measurements of a training; a short run has one"
    )
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args()
    chats = given.out / "chats"
    asks = not (chats / "train.jsonl").exists()
    if asks and not (given.requests and given.held):
        parser.error(f"there are no answers in {chats}, so --requests and --held are needed")
    started = time.time()

    def say(text: str) -> None:
        print(f"[{time.time() - started:.0f} s] {text}", flush=True)

    torch.manual_seed(0)
    settings = (
        "target",
        "limit",
        "exercises",
        "questions",
        "steps",
        "short_steps",
        "batch",
        "sample",
    )
    claim(given.out, {name: getattr(given, name) for name in settings})
    if given.device == "cpu":  # rounds what is bfloat16 already, and sums in float32
        torch.set_float32_matmul_precision("medium")
    target, tokenizer = Target(require(given.target), given.device), load_tokenizer(given.target)
    say("target loaded")
    if asks:
        chats.mkdir(exist_ok=True)
        lines = given.requests.read_text().splitlines()[: given.limit]
        requests = [answers.Given(**json.loads(line)) for line in lines]
        held = [
            each.text or " ".join(message["content"] for message in each.messages or ())
            for path in given.held
            for each in read_prompts(path)
        ]
        answers.make(
            target, tokenizer, requests, held, chats, given.exercises, given.questions, LIMIT, say
        )
        torch.cuda.empty_cache()
    data, held_out = (
        Data(
            target,
            known,
            given.part,
            given.out / f"{name}.pt" if given.device == "cpu" else None,
            given.until > 0,
        )
        for name, known in zip(("train", "held"), sampled(chats, given.sample), strict=True)
    )
    say(f"{len(data.tokens)} positions read, {len(held_out.tokens)} held out")
    target.blocks[:] = target.blocks[-1:]  # what heads begin with
    hot = min(HOT, len(target.embed) // 6)
    starts, log = Starts(given.target, target, data, given.batch, hot), given.out / "log.jsonl"
    say("starts made")
    main_form = replace(MAIN, batch=given.batch, hot=hot)
    made = set[tuple[Form, int]]()
    for name in given.heads:
        form = replace(main_form, kind=name)
        made.add((form, given.steps))
        if not (given.out / name / "model.safetensors").exists():
            trainer = Trainer(name, form, target, starts, log)
            trainer.train(data, held_out, given.steps, given.notes)
            trainer.save(given.out / name, given.steps)
            say(f"{name} made")
    for seed in range(3):
        for name, short in SHORT.items():
            form = replace(short, seed=seed, batch=given.batch, hot=min(short.hot, hot))
            # What was made is not made twice: one of the two heads, or two forms that are one with few tokens.
            if time.time() - started < given.until and (form, given.short_steps) not in made:
                Trainer(name, form, target, starts, log).train(data, held_out, given.short_steps, 1)
                made.add((form, given.short_steps))
    say("done")


if __name__ == "__main__":
    main()
