"""Makes qwen-coder's head for Lyanna where bfloat16 is fast (AMX), from conversations of the target:

python benchmarks/qwen-coder/head.py CHATS --out lyanna [--minutes 20]
python -m benchmarks.chat.bundle lyanna --target qwen-coder

CHATS is a folder with train.jsonl and validation.jsonl (docs/results/qwen-coder.md says from which archives). What
`forerun train lyanna` does not do: states come from the de-quantised target in torch, token information begins as
bigrams of plain text, and Muon trains all matrices, the attention's too, at all places of every text.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from forerun.api.loading import load_tokenizer
from forerun.backends import prepare
from forerun.backends.heads import head_rows
from forerun.backends.hot import hot_tokens
from forerun.heads.heads import HeadLayer, HiddenConfig, HiddenDrafter, rotate
from forerun.train.corpus import source_files
from forerun.train.head import measure
from forerun.train.labels import label
from forerun.train.loop import save_card, save_tensors
from forerun.train.run import Run
from forerun.train.texts import of_chats, read_chats
from forerun.zoo import QWEN_CODER, hot_folder, require

TOP = 32  # tokens of the target's law at a position
HOT, RANK, INNER, UNROLL = 8192, 64, 1024, 3
HEADS, GROUPS, WIDTH, THETA = 12, 2, 128, 1e6
PROMPTS = 0.25  # share of the prompts' positions that count
POSITIONS = 2048  # of a batch; a step takes two, one a thread
MUON, ADAM, DECAY = 2e-3, 4e-3, 0.05
CHARACTERS = 28_000_000  # of plain text, for bigrams
PACKAGES = {"transformers": 500, "numpy": 300, "torch": 500}  # files of each, beside the standard library's
OF_ANSWERS = 12.0  # weight of a bigram of the target's answers, where one of plain text has 1
THREADS = 2


class Row(NamedTuple):
    tokens: list[int]
    begin: int  # from here on they are the answer's


# The target in bfloat16.


class Target:
    """The target's weights, its forward and its laws."""

    def __init__(self, path: Path) -> None:
        self.tensors = {
            each.name: torch.from_numpy(np.array(dequantize(each.data, each.tensor_type))).bfloat16()
            for each in GGUFReader(path).tensors
        }
        self.embed, self.head = self.tensors["token_embd.weight"], self.tensors["output.weight"]
        self.norm, self.size = self.tensors["output_norm.weight"], self.embed.shape[1]
        self.frequencies = THETA ** (-torch.arange(0, WIDTH, 2).float() / WIDTH)
        self.blocks = 1 + max(int(name.split(".")[1]) for name in self.tensors if name.startswith("blk."))

    def weight(self, block: int, name: str) -> Tensor:
        return self.tensors[f"blk.{block}.{name}"]

    def states(self, tokens: Tensor) -> Tensor:
        """Return the LM head's inputs [B, T, d] over tokens [B, T]."""
        x, positions = self.embed[tokens], torch.arange(tokens.shape[1])
        for block in range(self.blocks):
            of = lambda name, block=block: self.weight(block, name)  # noqa: E731
            y = functional.rms_norm(x, (self.size,), of("attn_norm.weight"), 1e-6)
            q, k, v = (
                functional.linear(y, of(f"attn_{each}.weight"), of(f"attn_{each}.bias"))
                .unflatten(-1, (-1, WIDTH))
                .transpose(1, 2)
                for each in "qkv"
            )
            q, k = (rotate(each, positions, self.frequencies) for each in (q, k))
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            x = x + functional.linear(mixed.transpose(1, 2).flatten(2), of("attn_output.weight"))
            y = functional.rms_norm(x, (self.size,), of("ffn_norm.weight"), 1e-6)
            gate = functional.silu(functional.linear(y, of("ffn_gate.weight")))
            x = x + functional.linear(gate * functional.linear(y, of("ffn_up.weight")), of("ffn_down.weight"))
        return functional.rms_norm(x, (self.size,), self.norm, 1e-6)

    def laws(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the likeliest tokens [n, TOP] behind states [n, d] and their log probabilities."""
        tokens, log_probs = [], []
        for part in states.split(192):
            logits = functional.linear(part, self.head)
            whole = torch.cat([few.float().exp_().sum(-1, keepdim=True).log_() for few in logits.split(8)])
            best = logits.topk(TOP + 8, -1).indices  # bfloat16 orders near ones by chance
            exact = torch.bmm(self.head[best].float(), part.float()[:, :, None])[..., 0]
            values, at = exact.topk(TOP, -1)
            tokens.append(best.gather(1, at).int())
            log_probs.append((values - whole).half())
        return torch.cat(tokens), torch.cat(log_probs)


def conversations(folder: Path, split: str) -> list[Row]:
    known = [each for each in read_chats(folder, split) if len(each.prompt) < 400]
    return [Row((each.prompt + each.answer)[:512][:-1], len(each.prompt) - 1) for each in known]


def batches(lengths: Sequence[int], positions: int, rng: random.Random) -> list[list[int]]:
    """Return all rows in batches of about the same length, shuffled."""
    found: list[list[int]] = [[]]
    for row in sorted(range(len(lengths)), key=lambda row: lengths[row] + rng.random() * 40):
        if found[-1] and (len(found[-1]) + 1) * max(lengths[each] for each in [*found[-1], row]) > positions:
            found.append([])
        found[-1].append(row)
    rng.shuffle(found)
    return found


class Data:
    """States and laws of rows, made once and kept in `folder`, a file a batch."""

    def __init__(self, target: Target, rows: Sequence[Row], folder: Path, pool: ThreadPoolExecutor) -> None:
        folder.mkdir(parents=True, exist_ok=True)

        def read(number: int, chosen: list[int]) -> dict[str, Tensor]:
            path = folder / f"{number:05d}.safetensors"
            if not path.exists():
                some = [rows[each] for each in chosen]
                width = max(len(each.tokens) for each in some)
                tokens = torch.tensor([each.tokens + [0] * (width - len(each.tokens)) for each in some])
                with torch.inference_mode():
                    states = target.states(tokens)
                    flat = torch.cat([own[: len(each.tokens)] for own, each in zip(states, some, strict=True)])
                    best, log_probs = target.laws(flat)
                kept = torch.cat([torch.tensor(each.tokens) for each in some])
                save_tensors(path, {"tokens": kept, "states": flat, "best": best, "log_probs": log_probs})
                print(f"{time.strftime('%T')} {path}", flush=True)
            return load_file(path)

        order = batches([len(each.tokens) for each in rows], 1536, random.Random(0))
        files = list(pool.map(read, range(len(order)), order))
        self.tokens, self.states, self.best, self.log_probs = (
            torch.cat([each[name] for each in files]) for name in ("tokens", "states", "best", "log_probs")
        )
        own = [rows[each] for chosen in order for each in chosen]
        self.lengths = torch.tensor([len(each.tokens) for each in own])
        self.begins = torch.tensor([each.begin for each in own])
        self.starts = self.lengths.cumsum(0) - self.lengths

    def take(self, rows: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Return positions [B, T] in the tensors, which of them are texts', and which of them answers'."""
        at = torch.arange(int(self.lengths[rows].max()))
        within = at < self.lengths[rows][:, None]
        return self.starts[rows][:, None] + at * within, within, within & (at >= self.begins[rows][:, None])


# Token information.


def hot_set(answers: Tensor, questions: Tensor, plain: Tensor, vocabulary: int) -> Tensor:
    """Return the tokens that are most frequent in answers, questions at 0.3 and plain text at 0.01; rare ones in the
    order of the draft's own list."""
    counts = torch.zeros(vocabulary)
    for tokens, weight in ((answers, 1.0), (questions, 0.3), (plain, 0.01)):
        counts += weight * torch.bincount(tokens, minlength=vocabulary)
    known = hot_tokens(cast(Path, hot_folder(f"{QWEN_CODER}-draft")), None, vocabulary)
    assert known is not None
    counts[known] += torch.linspace(2, 0, len(known))
    return counts.argsort(descending=True)[:HOT]


def plain_text(tokenizer: Any) -> Tensor:
    """Return the tokens of the standard library's training files and of some packages' source."""
    texts = [text for _, text in source_files("train")]
    rng = np.random.default_rng(0)
    for name, most in PACKAGES.items():
        paths = sorted(Path(__import__(name).__file__).parent.rglob("*.py"))
        rng.shuffle(paths)  # type: ignore[arg-type]
        texts += [path.read_text(errors="ignore") for path in paths[:most]]
    np.random.default_rng(0).shuffle(texts)
    kept, size = [], 0
    for text in texts:
        kept.append(text[:60_000])
        size += len(kept[-1])
        if size > CHARACTERS:
            break
    rows = [row for at in range(0, len(kept), 64) for row in tokenizer(kept[at : at + 64])["input_ids"]]
    return torch.tensor([token for row in rows for token in row])


def bigrams(streams: Sequence[tuple[Tensor, float]], hot: Tensor, vocabulary: int) -> tuple[Tensor, Tensor, Tensor]:
    """Fit a model of the next hot token by the last one, of rank RANK. Return the tokens [n] that it knows, the states
    of these [n, r] and the weight [S, r]."""
    number = torch.full((vocabulary,), -1)
    number[hot] = torch.arange(len(hot))
    last = torch.cat([tokens[:-1] for tokens, _ in streams]).numpy()
    following = number[torch.cat([tokens[1:] for tokens, _ in streams])].numpy()
    weights = np.concatenate([np.full(len(tokens) - 1, weight) for tokens, weight in streams])
    kept = following >= 0
    pairs, place = np.unique(last[kept] * len(hot) + following[kept], return_inverse=True)
    counts = np.bincount(place, weights[kept])
    first, second = np.divmod(pairs, len(hot))
    known, starts = np.unique(first, return_index=True)
    ends, totals = np.append(starts[1:], len(first)), np.add.reduceat(counts, starts)
    alone = np.bincount(second, counts, len(hot)) + 1
    states = torch.randn(len(known), RANK)
    states[:, 0] = 2.0
    weight = torch.randn(len(hot), RANK) * 0.02
    weight[:, 0] = torch.tensor(np.log(alone) - np.log(alone).mean(), dtype=torch.float32) / 2
    states.requires_grad_()
    weight.requires_grad_()
    optimizer = torch.optim.Adam([{"params": [states]}, {"params": [weight]}], betas=(0.9, 0.95))
    odds = np.sqrt(totals) / np.sqrt(totals).sum()
    steps, size = 900, 768
    for step in range(steps):
        for group, rate in zip(optimizer.param_groups, (0.05, 0.01), strict=True):
            group["lr"] = rate * min(1, (step + 1) / 30, (1 - step / steps) / 0.7)
        rows = torch.multinomial(torch.tensor(odds), size, replacement=True).numpy()
        each = np.concatenate([np.arange(starts[row], ends[row]) for row in rows])
        lengths = ends[rows] - starts[rows]
        row = torch.tensor(np.repeat(np.arange(size), lengths))
        share = torch.tensor(counts[each] / np.repeat(totals[rows], lengths), dtype=torch.float32)
        weighed = torch.tensor(totals[rows] / totals.sum() / odds[rows] / size, dtype=torch.float32)
        logits = functional.rms_norm(states[torch.tensor(rows)], (RANK,)) @ weight.T
        log_probs = logits.log_softmax(-1)
        loss = -(weighed[row] * share * log_probs[row, torch.tensor(second[each])]).sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_([states, weight], 1.0)
        optimizer.step()
    return torch.tensor(known), functional.rms_norm(states.detach(), (RANK,)), weight.detach()


# The head.


def begin(target: Target, data: Data, hot: Tensor, pool: ThreadPoolExecutor) -> HiddenDrafter:
    """Return a head that begins as least squares' map from a state and the next token to the next state; its layer is
    the target's last, whose output does not count yet."""
    config = HiddenConfig(
        hidden_size=target.size,
        intermediate_size=INNER,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        head_dim=WIDTH,
        rope_theta=THETA,
        rank=RANK,
        bias=True,
        vocab_size=len(target.embed),
        hot_size=HOT,
        states=UNROLL,
        max_position_embeddings=32768,
    )
    head = HiddenDrafter(config)
    head.begin()
    head.hot.copy_(hot)
    layer, last = cast(HeadLayer, head.layers[0]), target.blocks - 1

    def of(name: str) -> Tensor:
        return target.weight(last, name).float()

    gate, up, down = of("ffn_gate.weight"), of("ffn_up.weight"), of("ffn_down.weight")
    kept = (gate.norm(dim=1) * up.norm(dim=1) * down.norm(dim=0)).topk(INNER).indices
    gain = target.norm.float().clamp(min=0.1)

    def sums(rows: list[int]) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            at, within, _ = data.take(rows)
            states, seen = data.states[at].float(), within[:, 1:]
            after = functional.rms_norm(target.embed[data.tokens[at][:, 1:]].float(), (target.size,))
            x = torch.cat([states[:, :-1], after], -1)[seen]
            return x.T @ x, x.T @ (states[:, 1:] / gain)[seen]

    with torch.no_grad():
        layer.qkv.weight.copy_(torch.cat([of(f"attn_{each}.weight") for each in "qkv"]))
        layer.qkv.bias.copy_(torch.cat([of(f"attn_{each}.bias") for each in "qkv"]))
        layer.gate_up.weight.copy_(torch.cat([gate[kept], up[kept]]))
        layer.before_attention.weight.copy_(of("attn_norm.weight"))
        layer.before_mlp.weight.copy_(of("ffn_norm.weight"))
        head.norm.weight.copy_(gain)
        found = list(pool.map(sums, batches(data.lengths.tolist(), 4096, random.Random(1))[:16]))
        both, wanted = (torch.stack(each).sum(0) for each in zip(*found, strict=True))
        both.diagonal().add_(3e-3 * both.diagonal().mean())
        head.fuse.weight.copy_(torch.linalg.solve(both, wanted).T)
    return head


class Compared(torch.autograd.Function):
    """The weighted sum of cross-entropies with laws over the hot set. Logits exist for a few hundred places at a time,
    and their products are in bfloat16; the LM head is frozen."""

    @staticmethod
    def forward(
        ctx: Any, states: Tensor, said: Tensor, answer: Tensor, lm: Tensor, best: Tensor, probs: Tensor, weight: float
    ) -> Tensor:
        matrix, x = torch.cat([lm, answer.bfloat16()], 1), torch.cat([states, said], 1).bfloat16()
        by_x, by_answer, total = torch.empty_like(x), torch.zeros_like(answer), 0.0
        for part in torch.arange(len(x)).split(384):
            wanted, tokens = probs[part], best[part]
            logits, mass = functional.linear(x[part], matrix).float(), wanted.sum(-1, keepdim=True)
            whole = logits.logsumexp(-1, keepdim=True)
            total += weight * float((mass * whole).sum() - (wanted * logits.gather(1, tokens)).sum())
            slope = logits.sub_(whole).exp_().mul_(mass * weight).scatter_add_(1, tokens, -wanted * weight).bfloat16()
            by_x[part] = slope @ matrix
            by_answer += (slope.T @ x[part, states.shape[1] :]).float()
        ctx.save_for_backward(by_x.float(), by_answer)
        return states.new_tensor(total)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> Any:
        by_x, by_answer = ctx.saved_tensors
        size = by_x.shape[1] - RANK
        return by_x[:, :size] * slopes[0], by_x[:, size:] * slopes[0], by_answer * slopes[0], None, None, None, None


class Trainer:
    """A head with what its loss needs."""

    def __init__(self, head: HiddenDrafter, target: Target, pool: ThreadPoolExecutor) -> None:
        self.head, self.embed, self.pool = head, target.embed, pool
        self.lm = target.head[head.hot].contiguous()
        self.number = torch.full((len(target.embed),), -1)
        self.number[head.hot] = torch.arange(len(head.hot))

    def drafts(self, data: Data, at: Tensor) -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            return self.head.drafted(data.states[at].float(), self.embed[data.tokens[at]].float(), UNROLL)

    def wanted(self, data: Data, at: Tensor) -> tuple[Tensor, Tensor]:
        """Return the laws at positions [n] as tokens of the hot set and their probabilities."""
        tokens = self.number[data.best[at].long()]
        return tokens.clamp(min=0), data.log_probs[at].float().exp() * (tokens >= 0)

    def gradients(self, data: Data, rows: list[int]) -> tuple[list[float], tuple[Tensor, ...]]:
        """Return the losses of the places and the gradients of their mean."""
        at, within, answers = data.take(rows)
        chosen, losses = answers | within & (torch.rand(answers.shape) < PROMPTS), []
        for k, states in enumerate(self.drafts(data, at), 1):
            text, place = chosen[:, k:].nonzero(as_tuple=True)
            source = at[text, place + k]
            said = self.head.token_states(data.tokens[source])
            own = self.lm, *self.wanted(data, source), 1 / max(1, len(text))
            losses.append(Compared.apply(states[text, place].float(), said, self.head.answer.weight, *own))
        total: Tensor = torch.stack(losses).mean()
        return [float(each.detach()) for each in losses], torch.autograd.grad(total, list(self.head.parameters()))

    @torch.no_grad()
    def measure(self, data: Data) -> tuple[list[float], float]:
        """Return the shares of greedy chains whose first 1, 2, ... tokens are the target's own, and the mean loss."""
        hits, cases, losses = ([0.0] * UNROLL for _ in range(3))
        for rows in batches(data.lengths.tolist(), POSITIONS, random.Random(0)):
            at, within, answers = data.take(rows)
            best = data.best[at][..., 0].long()
            kept = functional.pad(best[:, :-1] == data.tokens[at][:, 1:], (0, 1))
            live = (answers & functional.pad(within[:, UNROLL:], (0, UNROLL)))[:, :-UNROLL]
            length = live.shape[1]
            for k, states in enumerate(self.drafts(data, at), 1):
                text, place = live.nonzero(as_tuple=True)
                source = at[text, place + k]
                logits = functional.linear(states[text, place].bfloat16(), self.lm).float()
                logits += self.head.token_information(data.tokens[source])
                tokens, probs = self.wanted(data, source)
                losses[k - 1] -= float((probs * logits.log_softmax(-1).gather(1, tokens)).sum())
                hit = self.head.hot[logits.argmax(-1)] == best[text, place + k]
                hits[k - 1] += float(hit.sum())
                cases[k - 1] += len(hit)
                followed = torch.zeros_like(live)
                followed[text, place] = hit
                live = followed & kept[:, k : k + length]
        shares = np.cumprod([hit / max(1, case) for hit, case in zip(hits, cases, strict=True)])
        loss = float(np.mean([loss / max(1, case) for loss, case in zip(losses, cases, strict=True)]))
        return [round(float(share), 4) for share in shares], round(loss, 4)

    def train(self, data: Data, minutes: float, evaluate: Callable[[int], None]) -> None:
        """Train until the time is over."""
        inner = {
            n for n, p in self.head.named_parameters() if p.ndim == 2 and n.split(".")[0] not in ("embed", "answer")
        }
        named = dict(self.head.named_parameters())
        others = [parameter for name, parameter in named.items() if name not in inner]
        optimizers: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(others, ADAM, betas=(0.9, 0.95), weight_decay=0.0),
            *(
                torch.optim.Muon([named[name]], MUON, DECAY, adjust_lr_fn="match_rms_adamw", ns_steps=4)
                for name in sorted(inner)
            ),
        ]
        bases = [ADAM, *[MUON] * len(inner)]
        step, evaluated, started = 0, time.time(), time.time()
        queue = _forever(data)
        while (passed := (time.time() - started) / (60 * minutes)) < 1:
            rate = max(0.01, min(1.0, (step + 1) / 20, (1 - passed) / 0.6))
            for optimizer, base in zip(optimizers, bases, strict=True):
                optimizer.param_groups[0]["lr"] = base * rate
            chosen = [next(queue) for _ in range(THREADS)]
            found = list(self.pool.map(lambda rows: self.gradients(data, rows), chosen))
            for parameter, *slopes in zip(named.values(), *(each for _, each in found), strict=True):
                parameter.grad = sum(slopes[1:], slopes[0]) / len(slopes)
            torch.nn.utils.clip_grad_norm_(named.values(), 1.0)
            list(self.pool.map(lambda optimizer: optimizer.step(), optimizers))
            step += 1
            if step % 20 == 0:
                losses = np.mean([each for each, _ in found], 0).round(3).tolist()
                print(f"{time.strftime('%T')} step {step}: losses of places {losses}", flush=True)
            if time.time() - evaluated > 150:
                evaluate(step)
                evaluated = time.time()
        evaluate(step)


def _forever(data: Data) -> Iterator[list[int]]:
    rng = random.Random(0)
    while True:
        yield from batches(data.lengths.tolist(), POSITIONS, rng)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("chats", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=20)
    given = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    run = Run(QWEN_CODER, given.out, chats=given.chats)
    target, tokenizer = Target(require(QWEN_CODER)), load_tokenizer(QWEN_CODER)
    vocabulary = len(target.embed)
    with ThreadPoolExecutor(THREADS) as pool:
        data, held = (
            Data(target, conversations(given.chats, split), run.shared / "states" / split, pool)
            for split in ("train", "validation")
        )
        known = read_chats(given.chats, "train")
        answers, questions = (
            torch.tensor([token for each in known for token in getattr(each, part)]) for part in ("answer", "prompt")
        )
        plain = plain_text(tokenizer)
        hot = hot_set(answers, questions, plain, vocabulary)
        head = begin(target, data, hot, pool)
        tokens, states, weight = bigrams([(plain, 1.0), (answers, OF_ANSWERS)], hot, vocabulary)
        with torch.no_grad():
            head.embed.weight.copy_(functional.rms_norm(states.mean(0), (RANK,)).expand(vocabulary, -1))
            head.embed.weight[tokens] = states
            head.answer.weight.copy_(0.4 * weight)
        trainer = Trainer(head, target, pool)

        def evaluate(step: int) -> None:
            shares, loss = trainer.measure(held)
            print(f"{time.strftime('%T')} step {step}: validation loss {loss}, shares {shares}", flush=True)
            with (run.folder / "log.jsonl").open("a") as log:
                log.write(json.dumps({"step": step, "validation": loss, "survival": shares}) + "\n")
            save_tensors(run.folder / "head.safetensors", head.state_dict())

        run.folder.mkdir(parents=True, exist_ok=True)
        trainer.train(data, given.minutes, evaluate)
    finish(run, head)


def finish(run: Run, head: HiddenDrafter) -> None:
    """Calibrate a head through forerun's own forward and save it with its recipe."""
    model = run.load(QWEN_CODER, "target", frozen=True)
    target = prepare(model)
    assert run.chats is not None
    labels = label(run, target, of_chats(read_chats(run.chats, "validation")), states=True)
    rows = head_rows(target, head.hot, head.config.hidden_size)
    survival, head.config.curves = measure(head, rows, labels, cast(Any, model.get_input_embeddings()), UNROLL)
    recipe = {"seed": 0, "muon": MUON, "adam": ADAM, "unroll": UNROLL, "rank": RANK, "inner": INNER} | run.provenance
    head.config.target, head.config.recipe = target.fingerprint, recipe | {"validation": {"survival": survival}}
    head.save_pretrained(run.out)
    size, shares = sum(each.numel() for each in head.parameters()), ", ".join(f"{share:.3f}" for share in survival)
    text = f"""It drafts from the hidden states of `{QWEN_CODER}` and fits no other model: a fingerprint in
config.json is compared when it is loaded. benchmarks/qwen-coder/head.py made it.

{size:,} parameters. On held-out output its greedy chains are the target's own in their
first 1, 2, ... tokens in these shares: {shares}."""
    save_card(run.out, "A head of the kind lyanna for speculative decoding", text, recipe)
    print(survival)


if __name__ == "__main__":
    main()
