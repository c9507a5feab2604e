"""Drafts from many places of a text at once, with the target's verdict on every token; kept in files, so that a stopped
run continues."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from forerun.heads.echo import SIZES, Echo
from forerun.heads.pre_verifier import LEAST, USUAL
from forerun.model.batch import additive
from forerun.model.causal_lm import CausalLM
from forerun.model.compat import cache_argument
from forerun.sampling.probabilities import probabilities_of
from forerun.sampling.sampler import Sampler
from forerun.train.labels import SHARD, together
from forerun.train.loop import save_missing
from forerun.train.run import Run
from forerun.train.texts import Texts

# Of `N` drafts of `G` tokens, each from an anchor: a last committed token, which the target has not run yet. By name:
#   tokens [N, G]: drafted tokens; rows, anchors [N]: the text of each draft, and the anchor's position in it.
#   accept [N, G]: how probable it is that the target accepts each token if it has those before it; greedily 0 or 1.
#   log_q [N, G]: log-probabilities of tokens under the distributions that they were chosen from.
#   history [N, 3]: lengths of the last runs of accepted tokens, the present one first; see `history`.
#   echoes [N, G, 5]: see `forerun.heads.echo`.
Drafts = dict[str, Tensor]
FIELDS = ("accept", "log_q", "history", "echoes")  # which files and training have


@dataclass(frozen=True)
class Kind:
    """Texts for training and validation that drafts leave, those of like lengths together."""

    sampler: Sampler  # of the target's output
    depth: int  # tokens of a draft
    texts: Texts
    val: Texts


def collect(
    run: Run, target: CausalLM, draft: CausalLM, kinds: Mapping[str, Kind], anchors: int, seed: int
) -> dict[str, tuple[Drafts, Drafts]]:
    """Draft from every kind's texts; return the drafts for training and for validation by kind.

    Existing files of 64 texts are left alone.
    """
    shards: list[tuple[Kind, Texts, Tensor, Path]] = []
    for name, kind in kinds.items():
        for split, texts in (("train", kind.texts), ("validation", kind.val)):
            for number, rows in enumerate(torch.arange(len(texts)).split(SHARD)):
                path = run.shared / f"rollouts/{split}-{name}-{number:05d}.safetensors"
                shards.append((kind, texts, rows, path))

    def make(number: int) -> Drafts:
        kind, texts, rows, _ = shards[number]
        generator = torch.Generator(target.device).manual_seed(seed + number)
        parts = []
        for few in rows.split(together(texts, target)):
            width = int(texts.ends[few].max()) + 1  # with the token after the end
            own = Texts(texts.tokens[few, :width], texts.begins[few], texts.ends[few]).to(
                target.device
            )
            parts.append(roll_out(target, draft, own, anchors, kind.depth, kind.sampler, generator))
        tensors = {name: torch.cat([part[name] for part in parts]).cpu() for name in FIELDS}
        return tensors | {"echoes": tensors["echoes"].to(torch.int8)}

    for *_, path in shards:
        if path.exists():
            with safe_open(path, "pt") as file:
                if lacking := {*FIELDS} - {*file.keys()}:
                    raise ValueError(
                        f"{path} is of an earlier version, without {lacking}: give another --work"
                    )
    save_missing([path for *_, path in shards], make, f"drafts of {SHARD} texts each", run.say)

    def loaded(texts: Texts) -> Drafts:
        files = [load_file(path) for _, own, _, path in shards if own is texts]
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
) -> Drafts:
    """Draft `depth` tokens from `count` anchors in each of B texts, whose tokens after `begins` are the target's own
    output under that sampler.

    A whole draft lies in the output. A text with fewer such places has fewer drafts; one of the texts must have one.
    Without sampling the texts decide what the target accepts; for sampling it runs the drafts as well. All drafts of a
    text go through one forward a token, as branches from a shared context.

    A count of None drafts from every place. Else half of the anchors, if available, stand where a draft would just have
    been rejected: most drafts begin there, and what follows is harder than elsewhere. The others stand anywhere (ours).
    """
    windows, begins = texts.tokens, texts.begins[:, None]
    last = texts.ends.clamp(max=windows.shape[1] - 1)[:, None] - depth  # where a draft may begin
    follows, judge = _Branches(draft, windows), _Branches(target, windows)
    p = _scores(sampler, judge.logits)
    kept = _kept(_scores(sampler, follows.logits), p, windows, sampler.greedy)
    kept[:, 1:] = kept[:, :-1].clone()  # now of each token, not of the one after it
    kept = torch.rand(kept.shape, generator=generator, device=kept.device) < kept
    at = torch.arange(int(begins.min()), int(last.max()) + 1, device=windows.device)
    assert len(at)
    allowed = (at >= begins) & (at <= last)
    if count is None:
        anchors, real = at.expand(len(windows), -1), allowed
    else:
        places, real = _choose(kept[:, at], allowed, count, generator)
        anchors = at[places]
    del p
    past = history(kept, texts.begins, anchors)
    logits, p_logits = follows.branch(anchors), judge.branch(anchors)
    tokens, accept, log_q = [], [], []
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
        log_q.append(probabilities_of(scores, chosen).clamp(min=LEAST).log())
        if step + 1 < depth:
            logits = follows.extend(chosen)
            if not sampler.greedy:
                p_logits = judge.extend(chosen)
    drafted = torch.stack(tokens, -1)
    found = {
        "tokens": drafted,
        "accept": torch.stack(accept, -1),
        "log_q": torch.stack(log_q, -1),
        "history": past,
        "echoes": echoes(windows, anchors, drafted),
        "rows": _rows(windows).expand_as(anchors),
        "anchors": anchors,
    }
    return {name: each[real] for name, each in found.items()}


def _kept(q: Tensor, p: Tensor, windows: Tensor, greedy: bool) -> Tensor:
    """Return [B, T - 1] and one column of ones: the probability that the next token of the window, if it was drafted,
    was accepted and is no correction: min(1, q / p). Scores [B, T, V]."""
    following = windows[:, 1:, None]
    if greedy:
        right = (q[:, :-1].argmax(-1, keepdim=True) == following)[..., 0].float()
    else:
        logs = [
            (s - s.logsumexp(-1, keepdim=True))[:, :-1].gather(-1, following)[..., 0]
            for s in (q, p)
        ]
        right = (logs[0] - logs[1]).exp().nan_to_num(1.0).clamp(max=1.0)
    return torch.cat([right, torch.ones_like(right[:, :1])], 1)


def _choose(
    kept: Tensor, allowed: Tensor, count: int, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    """Return `count` allowed columns [B, count] of [B, C], half of them not kept if available, and which of them are
    real, as a row may have fewer."""
    order = torch.rand(kept.shape, generator=generator, device=kept.device).masked_fill(
        ~allowed, 3.0
    )
    wrong = (order + kept.float()).argsort(-1)[:, : count // 2]
    order.scatter_(-1, wrong, 2.0)  # not twice
    others = order.argsort(-1)[:, : count - count // 2]
    return torch.cat([wrong, others], -1), torch.cat(
        [allowed.gather(-1, wrong), order.gather(-1, others) < 1], -1
    )


def history(kept: Tensor, begins: Tensor, anchors: Tensor) -> Tensor:
    """Return [B, A, 3]: tokens of the output up to each anchor since its last rejection, between that and the one
    before, and once more. `kept` [B, T]: which tokens are no corrections. The output begins after `begins` [B]."""
    found = torch.zeros(*anchors.shape, 3)
    for row, wrong in enumerate((~kept).cpu().tolist()):
        first = int(begins[row]) + 1
        places = [at for at in range(first, len(wrong)) if wrong[at]]
        for i, anchor in enumerate(anchors[row].tolist()):
            before = [first - 1, *[at for at in places if at <= anchor]][-3:]
            runs = [
                anchor - before[-1],
                *[right - left - 1 for left, right in pairwise(before)][::-1],
            ]
            found[row, i] = torch.tensor([*runs, *[USUAL] * 3][:3], dtype=torch.float32)
    return found.to(anchors.device)


def echoes(windows: Tensor, anchors: Tensor, drafted: Tensor) -> Tensor:
    """Return the echoes [B, A, G, 5] of tokens [B, A, G] drafted after anchors [B, A] in windows [B, T]."""
    found = torch.zeros(*drafted.shape, len(SIZES))
    for row, text in enumerate(windows.tolist()):
        echo = Echo()
        places = anchors[row].tolist()
        for i in sorted(range(len(places)), key=places.__getitem__):
            before = text[: places[i] + 1]
            echo.read(before)
            found[row, i] = torch.tensor(
                echo.answers(before[-max(SIZES) :], drafted[row, i].tolist())
            )
    return found.to(drafted.device)


def _rows(windows: Tensor) -> Tensor:
    return torch.arange(len(windows), device=windows.device)[:, None]


def _scores(sampler: Sampler, logits: Tensor) -> Tensor:
    flat = logits.flatten(0, 1)
    return sampler.scores(flat, lambda _: []).view(
        logits.shape
    )  # no processor here reads the tokens before


class _Branches:
    """A model's forwards over windows [B, T], then along branches from them, one token a branch at a time."""

    def __init__(self, model: CausalLM, windows: Tensor) -> None:
        self.model, self.depth = model, 0
        self.network: PreTrainedModel = model.model
        name = cache_argument(self.network.forward)
        assert name is not None  # check_model
        self.cache = {name: DynamicCache()}
        self.logits: Tensor = self.network(
            input_ids=windows, use_cache=True, **self.cache
        ).logits  # [B, T, V]

    def branch(self, anchors: Tensor) -> Tensor:
        """Return logits [B, A, V] at the positions `anchors` [B, A], where branches begin."""
        length, at = self.logits.shape[1], _rows(anchors)
        self.anchors = anchors
        self.seen = (
            torch.arange(length, device=anchors.device) <= anchors[:, :, None]
        )  # [B, A, keys]
        self._own = torch.eye(anchors.shape[1], dtype=torch.bool, device=anchors.device).expand(
            len(anchors), -1, -1
        )
        logits = self.logits[at, anchors]
        del self.logits
        return logits

    def extend(self, tokens: Tensor) -> Tensor:
        """Return the same after one more token [B, A] of every branch."""
        self.depth += 1
        self.seen = torch.cat([self.seen, self._own], -1)
        found: Tensor = self.network(
            input_ids=tokens,
            position_ids=self.anchors + self.depth,
            attention_mask=additive(self.seen, self.network.dtype),
            use_cache=True,
            **self.cache,
        ).logits
        return found
