"""Makes qwen-coder's heads on one GPU: answers, the target's states, the head of the package, an EAGLE-like one of the
same size, steps and data, and short runs that change one thing each, with three seeds.

    python -m benchmarks.gpu.heads --requests requests.jsonl --held DATA --out OUT [--seconds 180] [--until 600]

`python -m benchmarks.gpu.finish OUT/lyanna` calibrates a head on a CPU afterwards. OUT/log.jsonl has the curves.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from benchmarks.gpu import answers
from benchmarks.gpu.target import PART, Target, product
from forerun.api.loading import load_tokenizer
from forerun.backends.hot import hot_tokens
from forerun.bench.datasets import read_prompts
from forerun.heads.heads import HeadLayer, HiddenConfig, HiddenDrafter
from forerun.train.texts import Conversation, read_chats, read_texts
from forerun.zoo import QWEN_CODER, hot_folder, require

PROMPTS = 0.25  # share of the prompts' positions that count
MUON, ADAM, DECAY = 2e-3, 4e-3, 0.05
PLACES = 8192  # whose logits exist at a time
LIMIT = 320  # tokens of an answer
HOT = 16_384


@dataclass(frozen=True)
class Form:
    """A head and how it is trained."""

    kind: str = "lyanna"
    hot: int = HOT
    rank: int = 64
    inner: int = 2048
    unroll: int = 4
    layers: int = 1
    seed: int = 0
    copied: bool = True  # begins as least squares' map and the target's last layer
    informed: bool = True  # the first step sees the token that follows
    law: bool = True  # the loss is with the target's law, not with its likeliest token
    batch: int = 16_384  # positions
    rate: float = 1.0  # of both learning rates


MAIN = Form()
SHORT = {
    "as it is": MAIN,
    "no token in the first step": replace(MAIN, informed=False),
    "no token information": replace(MAIN, rank=0),
    "likeliest token": replace(MAIN, law=False),
    "8,192 hot tokens": replace(MAIN, hot=8192),
    "unrolled once": replace(MAIN, unroll=1),
    "random start": replace(MAIN, copied=False),
    "EAGLE-like": replace(MAIN, kind="eagle"),
}
SHORT_STEPS = 40


class Batch(NamedTuple):
    """Texts: their positions in Data's tensors [B, T], which of them are texts', and which of them answers'."""

    at: Tensor
    within: Tensor
    answers: Tensor


class Data:
    """Texts with the target's states. `whole` [n] divides the law behind a state, `best` [n] is its likeliest token."""

    def __init__(self, target: Target, known: list[Conversation]) -> None:
        rows = [(each.prompt + each.answer)[:-1] for each in known]
        order = sorted(range(len(rows)), key=lambda row: len(rows[row]))
        self.sources = [known[each].source for each in order]
        device = target.device
        self.lengths = torch.tensor([len(rows[each]) for each in order])
        self.begins = torch.tensor([len(known[each].prompt) - 1 for each in order], device=device)
        starts = self.lengths.cumsum(0) - self.lengths
        total = int(self.lengths.sum())
        self.tokens = torch.tensor([token for each in order for token in rows[each]], device=device)
        self.states = torch.empty(total, target.size, dtype=torch.bfloat16, device=device)
        self.whole, self.best = torch.empty(total, device=device), torch.empty(total, dtype=torch.int32, device=device)
        self.starts, self.ends = starts.to(device), self.lengths.to(device)
        for some in self.batches(PART, random.Random(0)):
            at, within, _ = self.take(some)
            states = target.read(self.tokens[at])[within]
            best, whole = target.law(states)
            chosen = at[within]
            self.states[chosen], self.best[chosen], self.whole[chosen] = states, best, whole

    def batches(self, positions: int, rng: random.Random) -> list[list[int]]:
        """Return all rows in batches of about the same length, shuffled."""
        found: list[list[int]] = [[]]
        noisy = sorted(range(len(self.lengths)), key=lambda row: int(self.lengths[row]) + rng.random() * 24)
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
        within = at < self.ends[own][:, None]
        return Batch(self.starts[own][:, None] + at * within, within, within & (at >= self.begins[own][:, None]))


class Starts:
    """What heads begin with, made once for all."""

    def __init__(self, target: Target, data: Data) -> None:
        vocabulary = len(target.embed)
        counts = torch.bincount(data.tokens, minlength=vocabulary).float().cpu()
        known = hot_tokens(cast(Path, hot_folder(f"{QWEN_CODER}-draft")), None, vocabulary)
        assert known is not None
        counts[known] += torch.linspace(2, 0, len(known))  # the draft's own order, for rare ones
        self.hot = counts.argsort(descending=True)[:HOT].to(target.device)
        self.number = torch.full((vocabulary,), -1, device=target.device)
        self.number[self.hot] = torch.arange(HOT, device=target.device)
        self.rank = MAIN.rank
        self.embed, self.answer = self._bigrams(data, vocabulary)
        self.fuse = self._linear(target, data)

    def _bigrams(self, data: Data, vocabulary: int, steps: int = 400, size: int = 32_768) -> tuple[Tensor, Tensor]:
        """Fit a model of the next hot token by the last one: its states [V, r] and its weight [S, r]."""
        device = data.tokens.device
        torch.manual_seed(0)
        embed = torch.randn(vocabulary, self.rank, device=device, requires_grad=True)
        weight = torch.zeros(HOT, self.rank, device=device, requires_grad=True)
        optimizer = torch.optim.Adam([{"params": [embed]}, {"params": [weight]}], betas=(0.9, 0.95))
        is_last = torch.zeros(len(data.tokens), dtype=torch.bool, device=device)
        is_last[data.starts + data.ends - 1] = True
        following = self.number[data.tokens.roll(-1)]
        chosen = (~is_last & (following >= 0)).nonzero()[:, 0]
        for step in range(steps):
            for group, rate in zip(optimizer.param_groups, (0.05, 0.01), strict=True):
                group["lr"] = rate * min(1, (step + 1) / 30, (1 - step / steps) / 0.7)
            at = chosen[torch.randint(len(chosen), (size,), device=device)]
            with torch.autocast(device.type, torch.bfloat16):
                logits = functional.linear(functional.rms_norm(embed[data.tokens[at]], (self.rank,)), weight)
            optimizer.zero_grad()
            functional.cross_entropy(logits.float(), following[at]).backward()
            optimizer.step()
        return functional.rms_norm(embed.detach(), (self.rank,)), 0.4 * weight.detach()

    def _linear(self, target: Target, data: Data) -> Tensor:
        """Return least squares' map [d, 2 d] from a state and the next token's embedding to the next state."""
        size, gain = target.size, target.norm.float().clamp(min=0.1)
        both, wanted = (torch.zeros(2 * size, width, device=target.device) for width in (2 * size, size))
        for rows in data.batches(16_384, random.Random(1))[:24]:
            at, within, _ = data.take(rows)
            states, seen = data.states[at].float(), within[:, 1:]
            after = functional.rms_norm(target.embed[data.tokens[at][:, 1:]].float(), (size,))
            x = torch.cat([states[:, :-1], after], -1)[seen]
            both += x.T @ x
            wanted += x.T @ (states[:, 1:] / gain)[seen]
        both.diagonal().add_(3e-3 * both.diagonal().mean())
        return torch.linalg.solve(both, wanted).T


def begin(target: Target, starts: Starts, form: Form) -> HiddenDrafter:
    """Return a head. A copied one begins as least squares' map; its layers are the target's last, whose output does not
    count yet."""
    inner, table = form.inner, MAIN.rank * (len(target.embed) + form.hot)
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
        rank=form.rank,
        bias=True,
        vocab_size=len(target.embed),
        hot_size=form.hot,
        states=form.unroll,
        num_hidden_layers=form.layers,
        max_position_embeddings=32768,
    )
    torch.manual_seed(form.seed)
    head = HiddenDrafter(config)
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
        head.fuse.weight.copy_(starts.fuse)
        gate, up = last["gate_up"].float().chunk(2)
        kept = (
            (gate.norm(dim=1) * up.norm(dim=1) * last["down"].float().norm(dim=0)).topk(min(inner, len(gate))).indices
        )
        for layer in cast(list[HeadLayer], list(head.layers)):
            layer.qkv.weight.copy_(last["qkv"])
            layer.qkv.bias.copy_(last["bias"])
            layer.gate_up.weight[: len(kept)] = gate[kept]
            layer.gate_up.weight[inner : inner + len(kept)] = up[kept]
            layer.before_attention.weight.copy_(last["before_attention"])
            layer.before_mlp.weight.copy_(last["before_mlp"])
    return head


class Compared(torch.autograd.Function):
    """The mean cross-entropy of drafts with the target's laws over the hot set. Logits exist for PLACES places at a
    time; the LM head is frozen. `whole` [n] divides a law; where it is none, all of it is on the token `best` [n]."""

    @staticmethod
    def forward(
        ctx: Any, states: Tensor, said: Tensor, answer: Tensor, lm: Tensor, own: Tensor, whole: Tensor
    ) -> Tensor:
        rank = said.shape[1]
        matrix, x = torch.cat([lm, answer.bfloat16()], 1), torch.cat([states, said], 1).bfloat16()
        by_x, by_answer = torch.empty_like(x), torch.zeros_like(answer)
        total, weight = states.new_zeros(()), 1 / max(1, len(x))
        for part in torch.arange(len(x), device=x.device).split(PLACES):
            logits = product(x[part], matrix)
            if own.ndim == 2:
                wanted = product(own[part], lm).sub_(whole[part, None]).exp_()
            else:
                wanted = torch.zeros_like(logits)
                wanted.scatter_(1, own[part, None].clamp(min=0), (own[part, None] >= 0).float())
            mass, divided = wanted.sum(-1, keepdim=True), logits.logsumexp(-1, keepdim=True)
            total += weight * ((mass * divided).sum() - (wanted * logits).sum())
            slope = logits.sub_(divided).exp_().mul_(mass).sub_(wanted).mul_(weight).bfloat16()
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
        return by_x[:, :size].float() * slope, by_x[:, size:].float() * slope, by_answer * slope, None, None, None


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
            return self.head.drafted(data.states[at].float(), embedded * self.form.informed, steps)

    def token_states(self, tokens: Tensor) -> Tensor:
        return self.head.token_states(tokens) if self.head.informed else self.none[:1].expand(len(tokens), 0)

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
            losses.append(Compared.apply(states[text, place].float(), said, answer, self.lm, own, data.whole[source]))
        return torch.stack(losses)

    @torch.no_grad()
    def measure(self, data: Data, places: int = 4) -> dict[str, list[float]]:
        """Return for each source of questions the shares of greedy drafts that the target accepts at places 1, 2, ...
        after those before were accepted, and the share of its tokens that are hot."""
        names = sorted(set(data.sources))
        hits, cases = torch.zeros(2, len(names), places + 1, device=data.tokens.device).unbind(0)
        kinds = torch.tensor([names.index(each) for each in data.sources], device=data.tokens.device)
        for rows in data.batches(PART, random.Random(0)):
            at, within, answers = data.take(rows)
            best = data.best[at].long()
            kept = functional.pad(best[:, :-1] == data.tokens[at][:, 1:], (0, 1))
            live = (answers & functional.pad(within[:, places:], (0, places)))[:, :-places]
            length, kind = live.shape[1], kinds[torch.tensor(rows, device=at.device)]
            hot = (self.number[best] >= 0) & answers
            hits[:, places].index_add_(0, kind, hot.sum(1).float())
            cases[:, places].index_add_(0, kind, answers.sum(1).float())
            for k, states in enumerate(self.drafts(data, at, places), 1):
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
        shares = (hits / cases.clamp(min=1)).tolist()
        return {name: [round(share, 4) for share in row] for name, row in zip(names, shares, strict=True)}

    def train(self, data: Data, held: Data, steps: int | None, seconds: float, every: float) -> int:
        """Train `steps` steps, or for so many seconds; return the steps taken."""
        named = dict(self.head.named_parameters())
        inner = [
            each for name, each in named.items() if each.ndim == 2 and name.split(".")[0] not in ("embed", "answer")
        ]
        others = [each for each in named.values() if all(each is not one for one in inner)]
        optimizers = [
            torch.optim.AdamW(others, ADAM, betas=(0.9, 0.95), weight_decay=0.0),
            torch.optim.Muon(inner, MUON, DECAY, adjust_lr_fn="match_rms_adamw"),
        ]
        step, positions, recent = 0, 0, []
        started = evaluated = time.time()
        queue = self._forever(data)
        while True:
            passed = step / steps if steps else (time.time() - started) / seconds
            if passed >= 1:
                break
            rate = self.form.rate * max(0.01, min(1.0, (step + 1) / 20, (1 - passed) / 0.7))
            for optimizer, base in zip(optimizers, (ADAM, MUON), strict=True):
                optimizer.param_groups[0]["lr"] = base * rate
                optimizer.zero_grad()
            losses = self.loss(data, data.take(rows := next(queue)))
            losses.mean().backward()
            torch.nn.utils.clip_grad_norm_(named.values(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
            step, positions = step + 1, positions + int(data.lengths[rows].sum())
            recent = [*recent[-19:], losses.detach()]
            if time.time() - evaluated > every:
                self.note(step, positions, started, recent, held)
                evaluated = time.time()
        self.note(step, positions, started, recent, held)
        return step

    def note(self, step: int, positions: int, started: float, recent: list[Tensor], held: Data) -> None:
        losses = [round(each, 3) for each in torch.stack(recent).mean(0).tolist()]
        line = {"run": self.name, "seed": self.form.seed, "step": step, "positions": positions}
        line |= {"seconds": round(time.time() - started, 1), "losses": losses, "accepted": self.measure(held)}
        with self.log.open("a") as log:
            log.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)

    def _forever(self, data: Data) -> Iterator[list[int]]:
        rng = random.Random(self.form.seed)
        while True:
            yield from data.batches(self.form.batch, rng)

    def save(self, out: Path) -> None:
        """Save the head in bfloat16, without its calibration."""
        self.head.config.recipe = {name: each for name, each in vars(self.form).items() if name != "kind"}
        self.head.config.save_pretrained(out)
        tensors = {
            name: each.contiguous() if each.dtype == torch.long else each.bfloat16().contiguous()
            for name, each in self.head.state_dict().items()
        }
        save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=Path, required=True)
    parser.add_argument(
        "--held", type=Path, nargs="+", required=True, help="prompt files that nothing may share text with"
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--exercises", type=int, default=8192, help="how many are asked for")
    parser.add_argument("--questions", type=int, default=8192, help="how many are asked for")
    parser.add_argument("--seconds", type=float, default=180, help="of the training of each of the two heads")
    parser.add_argument("--until", type=float, default=600, help="seconds after which no short run begins")
    parser.add_argument("--limit", type=int, help="requests")
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args()
    started = time.time()

    def say(text: str) -> None:
        print(f"[{time.time() - started:.0f} s] {text}", flush=True)

    torch.manual_seed(0)
    given.out.mkdir(parents=True, exist_ok=True)
    target, tokenizer = Target(require(QWEN_CODER), given.device), load_tokenizer(QWEN_CODER)
    say("target loaded")
    chats = given.out / "chats"
    chats.mkdir(exist_ok=True)
    if not (chats / "train.jsonl").exists():
        requests = list(read_texts([str(given.requests)]))[: given.limit]
        held = [
            each.text or " ".join(message["content"] for message in each.messages or ())
            for path in given.held
            for each in read_prompts(path)
        ]
        answers.make(target, tokenizer, requests, held, chats, given.exercises, given.questions, LIMIT, say)
        torch.cuda.empty_cache()
    data, held_out = (Data(target, read_chats(chats, split)) for split in ("train", "validation"))
    say(f"{len(data.tokens)} positions read, {len(held_out.tokens)} held out")
    starts = Starts(target, data)
    say("starts made")
    log = given.out / "log.jsonl"
    steps: int | None = None
    for name, form in (("lyanna", MAIN), ("eagle", replace(MAIN, kind="eagle"))):
        trainer = Trainer(name, form, target, starts, log)
        steps = trainer.train(data, held_out, steps, given.seconds, given.seconds / 6)
        trainer.save(given.out / name)
        say(f"{name} made in {steps} steps")
    for seed in range(3):
        for name, form in SHORT.items():
            if time.time() - started < given.until:
                trainer = Trainer(name, replace(form, seed=seed), target, starts, log)
                trainer.train(data, held_out, SHORT_STEPS, 0, 1e9)
    say("done")


if __name__ == "__main__":
    main()
