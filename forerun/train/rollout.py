"""Drafts from many places of a text at once, with the target's verdict on every token; gathered in files, so that a
run goes on where it was stopped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from time import perf_counter

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from forerun.heads.echo import SIZES, Echo
from forerun.heads.pre_verifier import LEAST, USUAL, law_of
from forerun.model.batch import additive
from forerun.model.causal_lm import CausalLM
from forerun.model.compat import cache_argument
from forerun.model.eager import capture_hidden_states
from forerun.sampling.probabilities import probabilities_of
from forerun.sampling.sampler import Sampler
from forerun.train.labels import LOGITS, SHARD
from forerun.train.loop import save_tensors
from forerun.train.run import Run
from forerun.train.texts import Texts

Drafts = dict[str, Tensor]  # the fields of `Rollouts` that are kept, of many drafts


@dataclass(frozen=True)
class Rollouts:
    """Drafts of `G` tokens from `N` anchors; an anchor is a last committed token, which the target has not run yet.

    Attributes:
        tokens: [N, G] drafted tokens.
        accept: [N, G] the probability that the target accepts each token if it has accepted those before it; without
            sampling 0 or 1.
        hidden: [N, G, d] the draft's LM-head inputs that gave the tokens.
        log_q: [N, G] their log-probabilities under the distributions that they were chosen from.
        target: [N, D] the target's LM-head input that gave the anchor: the last that is known when drafting begins.
            Zeros where that is the prompt's last token: in decoding nothing is known there.
        history: [N, 3] how many tokens went well since the last rejection, before that, and before that; see `history`.
        echoes: [N, G, 5] whether each token follows what the text had before; see `forerun.heads.echo`.
        law: [N, 2] entropy and top probability of the target's law that the anchor was chosen from, by the sampler's
            scores; `forerun.heads.pre_verifier.UNKNOWN` at a prompt's last token.
        rows: [N] the text of each draft.
        anchors: [N] their positions in the texts.
    """

    tokens: Tensor
    accept: Tensor
    hidden: Tensor
    log_q: Tensor
    target: Tensor
    history: Tensor
    echoes: Tensor
    law: Tensor
    rows: Tensor
    anchors: Tensor


FIELDS = tuple(field.name for field in fields(Rollouts) if field.name not in ("rows", "anchors"))


@dataclass(frozen=True)
class Kind:
    """Texts that drafts leave.

    Attributes:
        sampler: that the target's output was chosen by.
        depth: tokens of a draft.
        texts, val: those to learn from and those for validation, of like lengths together.
    """

    sampler: Sampler
    depth: int
    texts: Texts
    val: Texts


def collect(
    run: Run, target: CausalLM, draft: CausalLM, kinds: Mapping[str, Kind], anchors: int, seed: int
) -> dict[str, tuple[Drafts, Drafts]]:
    """Draft from every kind's texts and return the drafts, by kind, to learn from and for validation.

    Files of 64 texts that are there are left alone. Processes take a file each in turn; the first one gets the drafts.
    """
    folder, sharing = run.shared / "rollouts", run.sharing
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[tuple[Kind, Texts, Tensor, Path, int]] = []
    for name, kind in kinds.items():
        for split, texts in (("train", kind.texts), ("validation", kind.val)):
            for number, rows in enumerate(torch.arange(len(texts)).split(SHARD)):
                path = folder / f"{split}-{name}-{number:05d}.safetensors"
                shards.append((kind, texts, rows, path, seed + len(shards)))
    missing = [each for each in shards[sharing.rank :: sharing.count] if not each[3].exists()]
    begun = perf_counter()
    for done, (kind, texts, rows, path, own_seed) in enumerate(missing, 1):
        generator = torch.Generator(target.device).manual_seed(own_seed)
        together = max(1, min(8, LOGITS // (texts.tokens.shape[1] * target.vocab_size)))
        parts = []
        for few in rows.split(together):
            width = int(texts.ends[few].max()) + 1  # with the token after the end
            own = Texts(texts.tokens[few, :width], texts.begins[few], texts.ends[few]).to(target.device)
            parts.append(roll_out(target, draft, own, anchors, kind.depth, kind.sampler, generator))
        tensors = {name: torch.cat([getattr(part, name) for part in parts]).cpu() for name in FIELDS}
        kept = {"hidden": torch.float16, "target": torch.float16, "tokens": torch.int32, "echoes": torch.int8}
        save_tensors(path, {name: value.to(kept.get(name, value.dtype)) for name, value in tensors.items()})
        left = (perf_counter() - begun) / done * (len(missing) - done) / 60
        run.say(f"drafts of {done}/{len(missing)} files, {left:.0f} min left")
    sharing.wait()
    if not sharing.is_first:
        return {}

    def loaded(texts: Texts) -> Drafts:
        files = [load_file(path) for _, own, _, path, _ in shards if own is texts]
        return {name: torch.cat([file[name] for file in files]) for name in FIELDS}

    return {name: (loaded(kind.texts), loaded(kind.val)) for name, kind in kinds.items()}


@torch.inference_mode()
def roll_out(
    target: CausalLM,
    draft: CausalLM,
    texts: Texts,
    count: int | None,
    depth: int,
    sampler: Sampler,
    generator: torch.Generator | None = None,
) -> Rollouts:
    """Drafts `depth` tokens from `count` anchors in each of B texts. Their tokens behind `begins` are the target's own
    output under that sampler. A whole draft lies in the output; a text with fewer such places has fewer drafts, and one
    of the texts must have one.

    Greedy, the texts tell what the target accepts; for sampling it runs the drafts as well. All drafts of a text go
    through one forward a token, as branches from a shared context.

    With a count of None from every place. Else half of the anchors, where there are so many, stand where a draft would
    just have been rejected: most drafts of a long-winded drafter begin there, and what follows is harder than
    elsewhere. The others stand anywhere (ours).
    """
    windows, begins = texts.tokens, texts.begins[:, None]
    last = texts.ends.clamp(max=windows.shape[1] - 1)[:, None] - depth  # where a draft may begin
    follows, judge = _Branches(draft, windows), _Branches(target, windows)
    p = _scores(sampler, judge.logits)
    kept = _kept(_scores(sampler, follows.logits), p, windows, sampler.greedy)
    kept[:, 1:] = kept[:, :-1].clone()  # now of each token, not of the one behind it
    kept = torch.rand(kept.shape, generator=generator, device=kept.device) < kept
    at = torch.arange(int(begins.min()), int(last.max()) + 1, device=windows.device)
    assert len(at)
    allowed = (at >= begins) & (at <= last)
    if count is None:
        anchors, real = at.expand(len(windows), -1), allowed
    else:
        places, real = _choose(kept[:, at], allowed, count, generator)
        anchors = at[places]
    before, begun = (anchors - 1).clamp(min=0), (anchors > begins)[..., None]
    known, law = judge.hidden[_rows(windows), before] * begun, law_of(p[_rows(windows), before]) * begun
    del p
    past = history(kept, texts.begins, anchors)
    logits, hidden = follows.branch(anchors)
    p_logits = judge.branch(anchors)[0]
    tokens, accept, states, log_q = [], [], [], []
    for step in range(depth):
        scores = _scores(sampler, logits)
        if sampler.greedy:
            chosen = scores.argmax(-1)
            accepted = (chosen == windows[_rows(windows), anchors + step + 1]).float()
        else:
            q, p = scores.softmax(-1), _scores(sampler, p_logits).softmax(-1)
            chosen = torch.multinomial(q.flatten(0, 1), 1, generator=generator).view(anchors.shape)
            ratio = p.gather(-1, chosen[..., None]) / q.gather(-1, chosen[..., None])
            accepted = ratio[..., 0].clamp(max=1.0)
        tokens.append(chosen)
        accept.append(accepted)
        states.append(hidden)
        log_q.append(probabilities_of(scores, chosen).clamp(min=LEAST).log())
        if step + 1 < depth:
            logits, hidden = follows.extend(chosen)
            if not sampler.greedy:
                p_logits = judge.extend(chosen)[0]
    drafted = torch.stack(tokens, -1)
    return Rollouts(
        tokens=drafted[real],
        accept=torch.stack(accept, -1)[real],
        hidden=torch.stack(states, -2)[real],
        log_q=torch.stack(log_q, -1)[real],
        target=known[real],
        history=past[real],
        echoes=echoes(windows, anchors, drafted)[real],
        law=law[real],
        rows=_rows(windows).expand_as(anchors)[real],
        anchors=anchors[real],
    )


def _kept(q: Tensor, p: Tensor, windows: Tensor, greedy: bool) -> Tensor:
    """[B, T - 1] and one column of ones: the probability that the next token of the window, if it was drafted, was
    drafted right: p's token is the draft's with min(1, q / p), else a correction. Scores [B, T, V]."""
    following = windows[:, 1:, None]
    if greedy:
        right = (q[:, :-1].argmax(-1, keepdim=True) == following)[..., 0].float()
    else:
        logs = [(s - s.logsumexp(-1, keepdim=True))[:, :-1].gather(-1, following)[..., 0] for s in (q, p)]
        right = (logs[0] - logs[1]).exp().nan_to_num(1.0).clamp(max=1.0)
    return torch.cat([right, torch.ones_like(right[:, :1])], 1)


def _choose(kept: Tensor, allowed: Tensor, count: int, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """`count` columns [B, count] of [B, C] that are allowed: half of them, or as many as there are, not kept; the
    others any. And which of them are meant, as a row may have fewer."""
    order = torch.rand(kept.shape, generator=generator, device=kept.device).masked_fill(~allowed, 3.0)
    wrong = (order + kept.float()).argsort(-1)[:, : count // 2]
    order.scatter_(-1, wrong, 2.0)  # not twice
    others = order.argsort(-1)[:, : count - count // 2]
    return torch.cat([wrong, others], -1), torch.cat([allowed.gather(-1, wrong), order.gather(-1, others) < 1], -1)


def history(kept: Tensor, begins: Tensor, anchors: Tensor) -> Tensor:
    """[B, A, 3] tokens of the output up to each anchor since its last rejection, between that and the one before, and
    once more. `kept` [B, T] says of each token whether it was no correction; behind `begins` [B] the output begins."""
    found = torch.zeros(*anchors.shape, 3)
    for row, wrong in enumerate((~kept).cpu().tolist()):
        first = int(begins[row]) + 1
        places = [at for at in range(first, len(wrong)) if wrong[at]]
        for i, anchor in enumerate(anchors[row].tolist()):
            before = [first - 1, *[at for at in places if at <= anchor]][-3:]
            runs = [anchor - before[-1], *[right - left - 1 for left, right in pairwise(before)][::-1]]
            found[row, i] = torch.tensor([*runs, *[USUAL] * 3][:3], dtype=torch.float32)
    return found.to(anchors.device)


def echoes(windows: Tensor, anchors: Tensor, drafted: Tensor) -> Tensor:
    """[B, A, G, 5] for tokens [B, A, G] drafted behind anchors [B, A] in windows [B, T]: what Echo answers there."""
    found = torch.zeros(*drafted.shape, len(SIZES))
    for row, text in enumerate(windows.tolist()):
        echo = Echo()
        places = anchors[row].tolist()
        for i in sorted(range(len(places)), key=places.__getitem__):
            before = text[: places[i] + 1]
            echo.hear(before)
            found[row, i] = torch.tensor(echo.answers(before[-max(SIZES) :], drafted[row, i].tolist()))
    return found.to(drafted.device)


def _rows(windows: Tensor) -> Tensor:
    return torch.arange(len(windows), device=windows.device)[:, None]


def _scores(sampler: Sampler, logits: Tensor) -> Tensor:
    flat = logits.flatten(0, 1)
    return sampler.scores(flat, lambda _: []).view(logits.shape)  # no processor here reads the tokens before


class _Branches:
    """A model's forwards over windows [B, T], then along branches from them, one token a branch at a time."""

    def __init__(self, model: CausalLM, windows: Tensor) -> None:
        self.model, self.depth = model, 0
        self.network: PreTrainedModel = model.model
        name = cache_argument(self.network.forward)
        assert name is not None  # check_model
        self.cache = {name: DynamicCache()}
        with capture_hidden_states(model.model) as heard:
            output = self.network(input_ids=windows, use_cache=True, **self.cache)
        self.logits, self.hidden = output.logits, heard[0]  # [B, T, V], [B, T, d]

    def branch(self, anchors: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [B, A, V] and hidden states [B, A, d] at the positions `anchors` [B, A], where branches begin."""
        rows, length = self.logits.shape[:2]
        self.anchors = anchors
        self.seen = torch.arange(length, device=anchors.device) <= anchors[:, :, None]  # [B, A, keys]
        self._own = torch.eye(anchors.shape[1], dtype=torch.bool, device=anchors.device).expand(rows, -1, -1)
        at = torch.arange(rows, device=anchors.device)[:, None]
        logits, hidden = self.logits[at, anchors], self.hidden[at, anchors]
        del self.logits, self.hidden
        return logits, hidden

    def extend(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The same behind one more token [B, A] of every branch."""
        self.depth += 1
        self.seen = torch.cat([self.seen, self._own], -1)
        with capture_hidden_states(self.model.model) as heard:
            output = self.network(
                input_ids=tokens,
                position_ids=self.anchors + self.depth,
                attention_mask=additive(self.seen, self.network.dtype),
                use_cache=True,
                **self.cache,
            )
        return output.logits, heard[0]
