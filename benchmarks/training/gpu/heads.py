"""Makes a target's heads on one GPU.

    python -m benchmarks.training.gpu.heads --requests requests.jsonl --held PROMPTS... --out OUT \
        [--target smollm2]

It makes answers, the target's states, the head of the package, an EAGLE-like one of the same size,
steps and data, and short runs that change one part each, with three seeds. With answers in
OUT/chats (`train_heads.sh` unpacks those in git) it needs no requests. A run that was stopped goes
on: answers and heads' checkpoints are kept in OUT, and on a CPU the states too; a GPU computes them
anew. OUT/log.jsonl has the curves. `python -m benchmarks.training.gpu.finish OUT/lyanna OUT/chats
--out lyanna` calibrates a head afterwards, on a CPU. `--device cpu` is for a `--sample` of
conversations and small steps (docs/lab/2026-11/training.md).
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from math import log
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from benchmarks.training.chats import Question, apart
from benchmarks.training.gpu.answers import Given, Maker, Wishes, held_texts
from benchmarks.training.gpu.data import Batch, Data
from benchmarks.training.gpu.starts import BATCH, HOT, MAIN, SHORT, Deeper, Form, Starts, begin
from benchmarks.training.gpu.target import LOGITS, PART, Target, product
from forerun.api.loading import load_tokenizer
from forerun.bench.datasets import read_prompts
from forerun.heads.heads import HEAD_KINDS
from forerun.train.loop import claim, load_checkpoint, save_checkpoint
from forerun.train.texts import Conversation, read_chats
from forerun.zoo import QWEN_CODER, SMOLLM2, require

Say = Callable[[str], None]

ANSWER_TOKENS = 320  # at most
PROMPT_SHARE = 0.25  # of the prompts' positions that count in the loss
MUON_RATE = 2e-3
ADAM_RATE = 4e-3
DECAY = 0.05
WARMUP = 20  # steps
COOLDOWN = 0.7  # share of the steps
LEAST_RATE = 0.01  # of the full rate
PLACES = 4  # drafted places that are measured
SEEDS = 3  # of the short runs
# The options that a run may not change when it goes on.
SETTINGS = (
    "target",
    "limit",
    "exercises",
    "questions",
    "steps",
    "short_steps",
    "batch",
    "sample",
)


class Compared(torch.autograd.Function):
    """The mean cross-entropy of drafts with the target's distributions over the hot set.

    Logits exist for LOGITS places at a time, and the LM head is frozen. Arguments of `apply`:

    - states [n, d] and said [n, r]: a draft's state and token information;
    - answer [S, r] and lm [S, d]: the weights that give logits;
    - truth: the target's states [n, d], or the numbers [n] of its likeliest tokens in the hot set,
      -1 for one that is not in it;
    - whole [n]: the log-sum-exps of the target's logits.
    """

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        said: Tensor,
        answer: Tensor,
        lm: Tensor,
        truth: Tensor,
        whole: Tensor,
    ) -> Tensor:
        rank = said.shape[1]
        matrix = torch.cat([lm, answer.bfloat16()], 1)
        x = torch.cat([states, said], 1).bfloat16()
        by_x = torch.empty_like(x)
        by_answer = torch.zeros_like(answer)
        total = states.new_zeros(())
        weight = 1 / max(1, len(x))
        for part in torch.arange(len(x), device=x.device).split(LOGITS):
            law = product(x[part], matrix).log_softmax(-1)
            # Both distributions have the factor `weight` from the start, because another pass over
            # all logits takes long.
            if truth.ndim == 2:
                shift = whole[part, None] - log(weight)
                wanted = product(truth[part], lm).sub_(shift).exp_()
            else:
                numbers = truth[part, None]
                wanted = torch.zeros_like(law)
                wanted.scatter_(1, numbers.clamp(min=0), (numbers >= 0).float() * weight)
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
        slope = slopes[0]
        states, said = by_x.float().tensor_split([by_x.shape[1] - ctx.rank], 1)
        return states * slope, said * slope, by_answer * slope, None, None, None


class Trainer:
    """A head with what its loss needs.

    Attributes:
        head: the head.
        lm: [S, d] the LM head of the hot tokens.
        number: [V] the place of each token among the hot ones, or -1.
    """

    def __init__(
        self, name: str, form: Form, target: Target, starts: Starts, log_path: Path
    ) -> None:
        self.name = name
        self.form = form
        self.embed = target.embed
        self.log_path = log_path
        self.head = begin(target, starts, form)
        self.lm = target.head[self.head.hot].contiguous()
        self.number = torch.where(starts.number < form.hot, starts.number, -1)
        self._no_information = torch.zeros(form.hot, 0, device=target.device)

    def drafts(self, data: Data, at: Tensor, steps: int) -> list[Tensor]:
        """Return the states of drafts of so many places, from every position of a batch."""
        with torch.autocast(at.device.type, torch.bfloat16):
            embedded = self.embed[data.tokens[at]].float()
            if isinstance(self.head, Deeper):
                self.head.lower = data.lower[at].float()
            states = data.states[at].float()
            return self.head.drafted(states, embedded * self.form.reads_token, steps)

    def token_states(self, tokens: Tensor) -> Tensor:
        """Return the token information's states [n, r]; r is 0 without it."""
        if self.head.informed:
            return self.head.token_states(tokens)
        return self._no_information[:1].expand(len(tokens), 0)

    def loss(self, data: Data, batch: Batch) -> Tensor:
        """Return the losses of the places [K]."""
        at, within, answers = batch
        is_chosen = torch.rand(answers.shape, device=at.device) < PROMPT_SHARE
        counted = answers | (within & is_chosen)
        answer = self.head.answer.weight if self.head.informed else self._no_information
        losses = []
        for k, states in enumerate(self.drafts(data, at, self.form.unroll), 1):
            text, place = counted[:, k:].nonzero(as_tuple=True)
            source = at[text, place + k]
            truth = data.states[source]
            if not self.form.law:
                truth = self.number[data.best[source].long()]
            said = self.token_states(data.tokens[source])
            drafted = states[text, place].float()
            loss = Compared.apply(drafted, said, answer, self.lm, truth, data.whole[source])
            losses.append(loss)
        return torch.stack(losses)

    @torch.no_grad()
    def measure(self, data: Data) -> tuple[dict[str, list[float]], dict[str, list[int]]]:
        """Measure greedy drafts, for each source of questions.

        Returns:
            The shares that the target accepts at places 1, 2, ... after those before were accepted,
            and of how many.
        """
        names = sorted(set(data.sources))
        kinds = torch.tensor(
            [names.index(source) for source in data.sources], device=data.tokens.device
        )
        counts = torch.zeros(2, len(names), PLACES, device=data.tokens.device)
        hits, cases = counts.unbind(0)
        for rows in data.batches(data.part, random.Random(0)):
            self._measure_batch(data, rows, kinds, hits, cases)
        shares = (hits / cases.clamp(min=1)).tolist()
        rounded = [list(map(_rounded, row)) for row in shares]
        by_source = dict(zip(names, rounded, strict=True))
        return by_source, dict(zip(names, cases.int().tolist(), strict=True))

    def _measure_batch(
        self, data: Data, rows: list[int], kinds: Tensor, hits: Tensor, cases: Tensor
    ) -> None:
        """Add the drafts of a batch to `hits` and `cases` [sources, PLACES]."""
        at, within, answers = data.take(rows)
        best = data.best[at].long()
        kept = functional.pad(best[:, :-1] == data.tokens[at][:, 1:], (0, 1))
        live = answers[:, :-PLACES] & within[:, PLACES:]
        length = live.shape[1]
        kind = kinds[torch.tensor(rows, device=at.device)]
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

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Return AdamW for tables and vectors, and Muon for the other matrices."""
        matrices = []
        others = []
        for name, parameter in self.head.named_parameters():
            is_table = name.split(".")[0] in ("embed", "answer")
            (others if parameter.ndim != 2 or is_table else matrices).append(parameter)
        return [
            torch.optim.AdamW(others, ADAM_RATE, betas=(0.9, 0.95), weight_decay=0.0),
            torch.optim.Muon(matrices, MUON_RATE, DECAY, adjust_lr_fn="match_rms_adamw"),
        ]

    def train(self, data: Data, held: Data, steps: int, notes: int) -> None:
        """Train up to `steps` steps, from a checkpoint if there is one.

        The log gets about `notes` lines.
        """
        optimizers = self.optimizers()
        checkpoint = self.log_path.with_name(f"{self.name}-{self.form.seed}.pt")
        first = load_checkpoint(checkpoint, self.head, optimizers) if checkpoint.exists() else 0
        batches = data.forever(self.form.batch, self.form.seed)
        positions = sum(int(data.lengths[next(batches)].sum()) for _ in range(first))
        recent: list[Tensor] = []
        started_at = time.time()
        torch.manual_seed(self.form.seed + first)
        for step in range(first, steps):
            rows = next(batches)
            set_rates(optimizers, rate_at(step, steps))
            recent = [*recent[-19:], self._step(data.take(rows), data, optimizers)]
            positions += int(data.lengths[rows].sum())
            if (step + 1) % max(1, steps // notes) == 0 or step + 1 == steps:
                save_checkpoint(checkpoint, step + 1, self.head, optimizers)
                seconds = round(time.time() - started_at, 1)
                losses = list(map(_rounded_loss, torch.stack(recent).mean(0).tolist()))
                place = {"step": step + 1, "positions": positions, "seconds": seconds}
                self.note(place | {"losses": losses}, held)

    def _step(self, batch: Batch, data: Data, optimizers: list[torch.optim.Optimizer]) -> Tensor:
        """Train on a batch, and return the losses of its places."""
        for optimizer in optimizers:
            optimizer.zero_grad()
        losses = self.loss(data, batch)
        losses.mean().backward()
        torch.nn.utils.clip_grad_norm_(list(self.head.parameters()), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        return losses.detach()

    def note(self, facts: dict[str, Any], held: Data) -> None:
        """Measure the head, and write a line of the log."""
        accepted, cases = self.measure(held)
        line = {"run": self.name, "seed": self.form.seed, **facts}
        line |= {"accepted": accepted, "cases": cases}
        with self.log_path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)

    def save(self, out: Path, steps: int) -> None:
        """Save the head in bfloat16, without its calibration."""
        recipe = {"muon": MUON_RATE, "adam": ADAM_RATE, "decay": DECAY, "prompts": PROMPT_SHARE}
        self.head.config.recipe = asdict(self.form) | recipe | {"steps": steps}
        self.head.config.save_pretrained(out)
        tensors = {}
        for name, tensor in self.head.state_dict().items():
            kept = tensor if tensor.dtype == torch.long else tensor.bfloat16()
            tensors[name] = kept.contiguous()
        save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})


def _rounded(share: float) -> float:
    return round(share, 4)


def _rounded_loss(loss: float) -> float:
    return round(loss, 3)


def rate_at(step: int, steps: int) -> float:
    """Return the share of the full rate at a step: it rises, stays, and falls."""
    rising = (step + 1) / min(WARMUP, 1 + steps // 5)
    falling = (1 - step / steps) / COOLDOWN
    return max(LEAST_RATE, min(1.0, rising, falling))


def set_rates(optimizers: list[torch.optim.Optimizer], share: float) -> None:
    for optimizer, rate in zip(optimizers, (ADAM_RATE, MUON_RATE), strict=True):
        optimizer.param_groups[0]["lr"] = rate * share


def sampled(chats: Path, counts: list[int] | None) -> tuple[list[Conversation], list[Conversation]]:
    """Return the conversations to train on, and the held-out ones.

    With `counts` there are so many of each, half of them the target's own questions and half about
    code, and none to train on shares text with a held-out one.
    """
    train = read_chats(chats, "train")
    held = read_chats(chats, "validation")
    if counts is None:
        return train, held
    held = some(held, counts[1])
    train, _ = apart(train, [Question(one.question, one.source, one.split) for one in held])
    return some(train, counts[0]), held


def some(conversations: list[Conversation], count: int) -> list[Conversation]:
    """Return so many conversations, half of them the target's own questions."""
    mixed = random.Random(0).sample(conversations, len(conversations))
    made_up = [one for one in mixed if one.source == "own"]
    about_code = [one for one in mixed if one.source != "own"]
    return made_up[: count // 2] + about_code[: count // 2]


def parsed() -> argparse.Namespace:
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
    args = parser.parse_args()
    has_answers = (args.out / "chats" / "train.jsonl").exists()
    if not has_answers and not (args.requests and args.held):
        parser.error(
            f"there are no answers in {args.out / 'chats'}, so --requests and --held are needed"
        )
    return args


def make_answers(target: Target, args: argparse.Namespace, say: Say) -> None:
    """Let the target answer, if it has not yet."""
    chats = args.out / "chats"
    if (chats / "train.jsonl").exists():
        return
    chats.mkdir(exist_ok=True)
    lines = args.requests.read_text().splitlines()[: args.limit]
    held: list[str] = []
    for path in args.held:
        held += held_texts(read_prompts(path))
    wishes = Wishes(
        given=[Given(**json.loads(line)) for line in lines],
        held=held,
        exercises=args.exercises,
        questions=args.questions,
        limit=ANSWER_TOKENS,
    )
    Maker(target, load_tokenizer(args.target), wishes, chats, say).make()
    torch.cuda.empty_cache()


def read_data(target: Target, args: argparse.Namespace) -> tuple[Data, Data]:
    """Return the texts to train on and the held-out ones, with the target's states."""
    data = []
    chats = sampled(args.out / "chats", args.sample)
    for name, known in zip(("train", "held"), chats, strict=True):
        kept = args.out / f"{name}.pt" if args.device == "cpu" else None
        data.append(Data(target, known, args.part, kept, lower=args.until > 0))
    return data[0], data[1]


def main() -> None:
    args = parsed()
    started_at = time.time()

    def say(text: str) -> None:
        print(f"[{time.time() - started_at:.0f} s] {text}", flush=True)

    torch.manual_seed(0)
    claim(args.out, {name: getattr(args, name) for name in SETTINGS})
    if args.device == "cpu":
        # It rounds what is bfloat16 already, and sums in float32.
        torch.set_float32_matmul_precision("medium")
    target = Target(require(args.target), args.device)
    say("target loaded")
    make_answers(target, args, say)
    data, held = read_data(target, args)
    say(f"{len(data.tokens)} positions read, {len(held.tokens)} held out")
    target.blocks[:] = target.blocks[-1:]  # the one with which heads begin
    hot = min(HOT, len(target.embed) // 6)
    starts = Starts(args.target, target, data, args.batch, hot)
    log_path = args.out / "log.jsonl"
    say("starts made")
    trained: set[tuple[Form, int]] = set()
    for name in args.heads:
        form = replace(MAIN, kind=name, batch=args.batch, hot=hot)
        trained.add((form, args.steps))
        if not (args.out / name / "model.safetensors").exists():
            trainer = Trainer(name, form, target, starts, log_path)
            trainer.train(data, held, args.steps, args.notes)
            trainer.save(args.out / name, args.steps)
            say(f"{name} made")
    for seed in range(SEEDS):
        for name, short in SHORT.items():
            form = replace(short, seed=seed, batch=args.batch, hot=min(short.hot, hot))
            # Equal runs are made once: one may be one of the two heads, and two forms may be one
            # with few tokens.
            is_new = (form, args.short_steps) not in trained
            if time.time() - started_at < args.until and is_new:
                trained.add((form, args.short_steps))
                trainer = Trainer(name, form, target, starts, log_path)
                trainer.train(data, held, args.short_steps, 1)
    say("done")


if __name__ == "__main__":
    main()
