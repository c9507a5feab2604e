"""Drafts from many places of a text at once, with the target's verdict on every token.

They are kept in files, so that a stopped run continues.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from forerun.heads.echo import SIZES, Echo
from forerun.heads.pre_verifier import MIN_PROBABILITY, USUAL_RUN
from forerun.model.batch import additive
from forerun.model.causal_lm import CausalLM
from forerun.model.compat import cache_argument
from forerun.sampling.probabilities import probabilities_of
from forerun.sampling.sampler import Sampler
from forerun.train.labels import SHARD, texts_per_forward
from forerun.train.loop import save_missing
from forerun.train.run import Run
from forerun.train.texts import Texts

# N drafts of G tokens, each from an anchor: the last committed token before the draft, which the
# target has not run yet. The tensors by name:
#   tokens [N, G]: drafted tokens.
#   rows, anchors [N]: the text of each draft, and the anchor's position in it.
#   accept [N, G]: the probability that the target accepts each token if it has accepted those
#     before it; 0 or 1 for greedy drafts.
#   log_q [N, G]: log-probabilities of the tokens under the distributions they were chosen from.
#   history [N, 3]: lengths of the last runs of accepted tokens, the present one first (`history`).
#   echoes [N, G, 5]: see `forerun.heads.echo`.
Drafts = dict[str, Tensor]
FIELDS = ("accept", "log_q", "history", "echoes")  # those that files and training have


@dataclass(frozen=True)
class Kind:
    """Texts to draft from, for training and for validation; texts of like lengths stand together.

    Attributes:
        sampler: how the target's output was sampled.
        depth: tokens of a draft.
        texts: the texts for training.
        val: the texts for validation.
    """

    sampler: Sampler
    depth: int
    texts: Texts
    val: Texts


class _Shard(NamedTuple):
    """The texts of one file of drafts.

    Attributes:
        kind: the kind of the texts.
        texts: `kind.texts` or `kind.val`.
        rows: which of these texts.
        path: the file.
    """

    kind: Kind
    texts: Texts
    rows: Tensor
    path: Path


def collect(
    run: Run, target: CausalLM, draft: CausalLM, kinds: Mapping[str, Kind], anchors: int, seed: int
) -> dict[str, tuple[Drafts, Drafts]]:
    """Draft from every kind's texts; return the drafts for training and for validation by kind.

    Files that exist are not made again; each has the drafts of SHARD texts.

    Raises:
        ValueError: a file is of an earlier version.
    """
    shards: list[_Shard] = []
    for name, kind in kinds.items():
        for split, texts in (("train", kind.texts), ("validation", kind.val)):
            for number, rows in enumerate(torch.arange(len(texts)).split(SHARD)):
                path = run.shared / f"rollouts/{split}-{name}-{number:05d}.safetensors"
                shards.append(_Shard(kind, texts, rows, path))

    def make(number: int) -> Drafts:
        kind, texts, rows, _ = shards[number]
        generator = torch.Generator(target.device).manual_seed(seed + number)
        parts = []
        for some in rows.split(texts_per_forward(texts, target)):
            width = int(texts.ends[some].max()) + 1  # with the token after the end
            part = Texts(texts.tokens[some, :width], texts.begins[some], texts.ends[some])
            part = part.to(target.device)
            drafts = roll_out(target, draft, part, anchors, kind.depth, kind.sampler, generator)
            parts.append(drafts)
        tensors = {name: _field(parts, name).cpu() for name in FIELDS}
        return tensors | {"echoes": tensors["echoes"].to(torch.int8)}

    paths = [shard.path for shard in shards]
    for path in paths:
        _check_file(path)
    save_missing(paths, make, f"drafts of {SHARD} texts each", run.say)

    def loaded(texts: Texts) -> Drafts:
        files = [load_file(shard.path) for shard in shards if shard.texts is texts]
        return {name: _field(files, name) for name in FIELDS}

    return {name: (loaded(kind.texts), loaded(kind.val)) for name, kind in kinds.items()}


def _field(parts: list[Drafts], name: str) -> Tensor:
    """Return one field of all parts together."""
    return torch.cat([part[name] for part in parts])


def _check_file(path: Path) -> None:
    """Raise ValueError if a file of drafts exists but lacks fields."""
    if not path.exists():
        return
    with safe_open(path, "pt") as file:
        lacking = set(FIELDS) - set(file.keys())
    if lacking:
        raise ValueError(f"{path} is of an earlier version, without {lacking}: give another --work")


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
    """Draft from many places of B texts at once.

    In each text the tokens after `begins` are the target's own output under the sampler. Every
    draft lies in the output as a whole. A text with fewer than `count` such places has fewer
    drafts; at least one text must have a place.

    For greedy drafts the texts decide what the target accepts; for sampled ones the target runs the
    drafts as well. Each token of all drafts of a text takes one forward, because the drafts are
    branches from a shared context.

    `count` drafts of `depth` tokens leave each text; None drafts from every place. Half of their
    anchors, if available, stand where a draft would just have been rejected, because most drafts
    begin there, and what follows is harder than elsewhere. The others stand anywhere (ours).
    """
    windows = texts.tokens
    draft_forward = _Forward(draft, windows)
    target_forward = _Forward(target, windows)
    kept = _sample_kept(draft_forward.logits, target_forward.logits, windows, sampler, generator)
    anchors, real = _anchors(kept, texts, count, depth, generator)
    past = history(kept, texts.begins, anchors)
    drafting = _Branches(draft_forward, anchors)
    judging = _Branches(target_forward, anchors)
    del draft_forward, target_forward  # because their logits [B, T, V] take much memory
    tokens = []
    accept = []
    log_q = []
    for step in range(depth):
        scores = _scores(sampler, drafting.logits)
        if sampler.greedy:
            chosen = scores.argmax(-1)
            following = windows[_row_numbers(windows), anchors + step + 1]
            accepted = (chosen == following).float()
        else:
            chosen, accepted = _sample(scores, _scores(sampler, judging.logits), generator)
        tokens.append(chosen)
        accept.append(accepted)
        log_q.append(probabilities_of(scores, chosen).clamp(min=MIN_PROBABILITY).log())
        if step + 1 < depth:
            drafting.extend(chosen)
            if not sampler.greedy:
                judging.extend(chosen)
    drafted = torch.stack(tokens, -1)
    drafts = {
        "tokens": drafted,
        "accept": torch.stack(accept, -1),
        "log_q": torch.stack(log_q, -1),
        "history": past,
        "echoes": echoes(windows, anchors, drafted),
        "rows": _row_numbers(windows).expand_as(anchors),
        "anchors": anchors,
    }
    return {name: tensor[real] for name, tensor in drafts.items()}


def _sample_kept(
    draft_logits: Tensor,
    target_logits: Tensor,
    windows: Tensor,
    sampler: Sampler,
    generator: torch.Generator | None,
) -> Tensor:
    """Return as bool [B, T] which tokens of windows are drawn as accepted, if they were drafted.

    The logits [B, T, V] are those of the two models over the windows [B, T].
    """
    target_scores = _scores(sampler, target_logits)
    chances = _kept(_scores(sampler, draft_logits), target_scores, windows, sampler.greedy)
    chances[:, 1:] = chances[:, :-1].clone()  # now of each token, not of the one after it
    return torch.rand(chances.shape, generator=generator, device=chances.device) < chances


def _kept(q: Tensor, p: Tensor, windows: Tensor, greedy: bool) -> Tensor:
    """Return [B, T - 1], and one column of ones: whether the next token of the window is kept.

    It is the probability that the token, if it was drafted, was accepted and is no correction:
    min(1, q / p), for the draft's scores `q` [B, T, V] and the target's `p`.
    """
    following = windows[:, 1:, None]
    if greedy:
        chances = (q[:, :-1].argmax(-1, keepdim=True) == following)[..., 0].float()
    else:
        log_ratio = _log_probs(q, following) - _log_probs(p, following)
        chances = log_ratio.exp().nan_to_num(1.0).clamp(max=1.0)
    return torch.cat([chances, torch.ones_like(chances[:, :1])], 1)


def _log_probs(scores: Tensor, following: Tensor) -> Tensor:
    """Return the log-probabilities [B, T - 1] of following tokens [B, T - 1, 1]."""
    log_probs = (scores - scores.logsumexp(-1, keepdim=True))[:, :-1]
    return log_probs.gather(-1, following)[..., 0]


def _sample(
    q_scores: Tensor, p_scores: Tensor, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    """Draw tokens [B, A]; return them and the probabilities [B, A] that the target accepts them.

    Scores [B, A, V] are the draft's, `q_scores`, and the target's, `p_scores`.
    """
    q = q_scores.softmax(-1)
    p = p_scores.softmax(-1)
    chosen = torch.multinomial(q.flatten(0, 1), 1, generator=generator).view(q.shape[:2])
    ratio = p.gather(-1, chosen[..., None]) / q.gather(-1, chosen[..., None])
    return chosen, ratio[..., 0].clamp(max=1.0)


def _anchors(
    kept: Tensor, texts: Texts, count: int | None, depth: int, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    """Return the anchors [B, A] of drafts, and which of them are real.

    Some are not, because a text may have fewer places than another; see `roll_out`.
    """
    begins = texts.begins[:, None]
    # Where a draft may begin at the latest.
    last = texts.ends.clamp(max=texts.tokens.shape[1] - 1)[:, None] - depth
    at = torch.arange(int(begins.min()), int(last.max()) + 1, device=kept.device)
    assert len(at)
    allowed = (at >= begins) & (at <= last)
    if count is None:
        return at.expand(len(kept), -1), allowed
    places, real = _choose(kept[:, at], allowed, count, generator)
    return at[places], real


def _choose(
    kept: Tensor, allowed: Tensor, count: int, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    """Return `count` allowed columns [B, count] of [B, C], and which of them are real.

    Half of them are not kept if available. A row may have fewer allowed columns than `count`.
    """
    order = torch.rand(kept.shape, generator=generator, device=kept.device)
    order = order.masked_fill(~allowed, 3.0)
    wrong = (order + kept.float()).argsort(-1)[:, : count // 2]
    order.scatter_(-1, wrong, 2.0)  # not twice
    others = order.argsort(-1)[:, : count - count // 2]
    columns = torch.cat([wrong, others], -1)
    real = torch.cat([allowed.gather(-1, wrong), order.gather(-1, others) < 1], -1)
    return columns, real


def history(kept: Tensor, begins: Tensor, anchors: Tensor) -> Tensor:
    """Return the lengths [B, A, 3] of the last runs of accepted tokens before anchors [B, A].

    The first is the number of tokens of the output up to the anchor since its last rejection, the
    second that between this rejection and the one before, the third once more.

    Args:
        kept: [B, T] which tokens are no corrections.
        begins: [B] the output begins after these positions.
        anchors: [B, A] positions.
    """
    lengths = torch.zeros(*anchors.shape, 3)
    for row, wrong in enumerate((~kept).cpu().tolist()):
        first = int(begins[row]) + 1
        corrections = [at for at in range(first, len(wrong)) if wrong[at]]
        for i, anchor in enumerate(anchors[row].tolist()):
            before = [first - 1, *[at for at in corrections if at <= anchor]][-3:]
            runs = [anchor - before[-1]]
            runs += [right - left - 1 for left, right in pairwise(before)][::-1]
            padded = [*runs, *[USUAL_RUN] * 3][:3]
            lengths[row, i] = torch.tensor(padded, dtype=torch.float32)
    return lengths.to(anchors.device)


def echoes(windows: Tensor, anchors: Tensor, drafted: Tensor) -> Tensor:
    """Return the echoes [B, A, G, 5] of drafted tokens.

    Args:
        windows: the texts [B, T].
        anchors: positions [B, A] of the tokens before the drafts.
        drafted: the drafted tokens [B, A, G].
    """
    answers = torch.zeros(*drafted.shape, len(SIZES))
    for row, text in enumerate(windows.tolist()):
        echo = Echo()
        places = anchors[row].tolist()
        for i in sorted(range(len(places)), key=places.__getitem__):
            before = text[: places[i] + 1]
            echo.read(before)
            tokens = drafted[row, i].tolist()
            answers[row, i] = torch.tensor(echo.answers(before[-max(SIZES) :], tokens))
    return answers.to(drafted.device)


def _row_numbers(windows: Tensor) -> Tensor:
    """Return the numbers [B, 1] of the rows."""
    return torch.arange(len(windows), device=windows.device)[:, None]


def _scores(sampler: Sampler, logits: Tensor) -> Tensor:
    """Return the processed scores [B, T, V] of logits [B, T, V]."""
    # No processor here reads the tokens before.
    scores = sampler.scores(logits.flatten(0, 1), lambda _: [])
    return scores.view(logits.shape)


class _Forward:
    """A model's forward over windows [B, T].

    Attributes:
        network: transformers' model.
        cache: its cache, as a keyword argument.
        logits: [B, T, V].
    """

    def __init__(self, model: CausalLM, windows: Tensor) -> None:
        self.network: PreTrainedModel = model.model
        name = cache_argument(self.network.forward)
        assert name is not None  # check_model
        self.cache = {name: DynamicCache()}
        outputs = self.network(input_ids=windows, use_cache=True, **self.cache)
        self.logits: Tensor = outputs.logits


class _Branches:
    """Forwards along branches from windows, one token of every branch at a time.

    Attributes:
        logits: [B, A, V] after the last token of every branch, at first after the anchor.
    """

    def __init__(self, forward: _Forward, anchors: Tensor) -> None:
        """Begin branches after the positions `anchors` [B, A] of the windows."""
        length = forward.logits.shape[1]
        device = anchors.device
        rows, count = anchors.shape
        self._network = forward.network
        self._cache = forward.cache
        self._anchors = anchors
        self._depth = 0
        # Which keys each branch sees [B, A, keys], and what a token adds to that: only itself.
        self._seen = torch.arange(length, device=device) <= anchors[:, :, None]
        self._itself = torch.eye(count, dtype=torch.bool, device=device).expand(rows, -1, -1)
        self.logits = forward.logits[_row_numbers(anchors), anchors]

    def extend(self, tokens: Tensor) -> None:
        """Run one more token [B, A] of every branch."""
        self._depth += 1
        self._seen = torch.cat([self._seen, self._itself], -1)
        outputs = self._network(
            input_ids=tokens,
            position_ids=self._anchors + self._depth,
            attention_mask=additive(self._seen, self._network.dtype),
            use_cache=True,
            **self._cache,
        )
        self.logits = outputs.logits
