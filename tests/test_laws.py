"""The target's distributions, kept as their most probable tokens."""

from __future__ import annotations

import torch
from torch.nn import functional
from toys import tiny

from forerun.model import CausalLM
from forerun.train.distill import distill_chats
from forerun.train.laws import MOST, cross_entropy, law_of
from forerun.train.loop import TrainConfig
from forerun.train.texts import of_windows


def logits(rows: int, vocabulary: int) -> torch.Tensor:
    return 4 * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(0))


def test_a_law_holds_the_most_probable_tokens() -> None:
    scores = logits(300, 500)
    law = law_of(lambda part: scores[part], len(scores))
    wanted = scores.softmax(-1)
    assert law.tokens.shape == (300, MOST)
    assert torch.equal(law.tokens[:, 0], scores.argmax(-1))
    torch.testing.assert_close(law.probabilities, wanted.topk(MOST).values)
    torch.testing.assert_close(wanted.gather(-1, law.tokens), law.probabilities)
    assert len(law_of(lambda part: scores[part], 0).tokens) == 0


def test_cross_entropy_is_that_of_the_whole_distribution_where_it_holds_all() -> None:
    scores, found = logits(20, 50), torch.randn(20, 50)
    law = law_of(lambda part: scores[part], len(scores))
    dense = -(scores.softmax(-1) * found.log_softmax(-1)).sum()
    torch.testing.assert_close(cross_entropy(found, law), dense)
    hot = torch.tensor([4, 30, 2, 49])
    within = -(scores.softmax(-1)[:, hot] * found[:, hot].log_softmax(-1)).sum()
    torch.testing.assert_close(cross_entropy(found[:, hot], law.within(hot, 50)), within)


def test_a_draft_with_hot_tokens_learns_these_and_no_other(tmp_path) -> None:  # type: ignore[no-untyped-def]
    target, draft = tiny("llama"), tiny("llama", seed=3)
    windows = torch.randint(target.config.vocab_size, (12, 16), generator=torch.Generator().manual_seed(0))
    texts, hot = of_windows(windows.numpy()), torch.tensor([5, 9, 20, 33])
    lines: list[str] = []
    config = TrainConfig(steps=12, batch=4, length=16, lr=1e-2, warmup=1, evaluate_every=6, save_every=100)
    before = draft.get_output_embeddings().weight.detach().clone()
    draft.config.tie_word_embeddings = False

    def among(model: object) -> torch.Tensor:
        with torch.no_grad():
            return model(input_ids=windows).logits[..., hot].log_softmax(-1)  # type: ignore[operator]

    wanted = among(target).exp()
    apart = functional.kl_div(among(draft), wanted, reduction="sum")
    distill_chats(CausalLM(target), draft, texts, texts, config, tmp_path / "draft", hot, lines.append)
    draft.eval()
    assert functional.kl_div(among(draft), wanted, reduction="sum") < 0.7 * apart
    moved = (draft.get_output_embeddings().weight - before).abs().amax(-1) > 0
    tied = draft.get_output_embeddings().weight is draft.get_input_embeddings().weight
    assert moved[hot].all() and (tied or int(moved.sum()) == len(hot))
    assert any("greedy agreement" in line for line in lines)
