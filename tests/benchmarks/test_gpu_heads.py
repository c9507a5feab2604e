"""benchmarks/training/gpu, on a CPU: the target in plain torch, and what a head learns from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.training.gpu.answers import exercise
from benchmarks.training.gpu.heads import Compared
from benchmarks.training.gpu.target import Target
from tests.support.ggufs import VOCAB, small, write


@pytest.fixture(scope="module", params=["qwen2", "llama"])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Target:
    model = small(request.param)
    path: Path = tmp_path_factory.mktemp("target") / "target.gguf"
    write(path, model, "F32")
    loaded = Target(path, "cpu")
    tokens = torch.randint(VOCAB, (3, 40))
    with torch.no_grad():
        wanted = model.model(tokens).last_hidden_state
    states = loaded.read(tokens, lower=(lower := []))
    assert (states.float() - wanted).norm() < 0.05 * wanted.norm()
    assert [each.shape for each in lower] == [states.shape] * 2
    return loaded


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_states_point_where_the_model_s_do(architecture: str, tmp_path: Path) -> None:
    model = small(architecture)
    tokens = torch.arange(3, 43).view(2, 20)
    target = Target(write(tmp_path / "model.gguf", model, "F32"), "cpu")
    with torch.no_grad():
        wanted = model.model(tokens).last_hidden_state
    states = target.read(tokens)
    assert torch.nn.functional.cosine_similarity(states.float(), wanted, dim=-1).min() > 0.999
    likeliest = (states[0].float() @ model.lm_head.weight.bfloat16().float().T).argmax(-1)
    assert torch.equal(target.law(states[0])[0].long(), likeliest)


def test_answers_are_greedy_or_drawn(target: Target) -> None:
    """Rows of many lengths, some of which end: the tokens are those of one forward over all."""
    prompts = [list(range(1, 3 + 7 * row)) for row in range(5)]
    stops = list(range(24))
    answers = target.generate(prompts, [0.0, 0.0, 1.0, 0.0, 0.0], 40, stops, rows=3)
    assert {len(each) for each in answers} != {40}
    for prompt, answer in zip(prompts, answers, strict=True):
        states = target.read(torch.tensor([prompt + answer]))[0, len(prompt) - 1 : -1]
        same = (target.law(states)[0] == torch.tensor(answer)).float().mean()
        assert (same > 0.9) == (prompt != prompts[2])
        assert not set(answer[:-1]) & set(stops) and (len(answer) == 40 or answer[-1] in stops)


@pytest.mark.parametrize("law", [True, False])
def test_a_loss_is_the_cross_entropy(law: bool) -> None:
    torch.manual_seed(0)
    states, said, answer = (
        torch.randn(*shape).bfloat16().float() for shape in ((9, 16), (9, 4), (30, 4))
    )
    lm = torch.randn(30, 16).bfloat16()
    whole = torch.full((9,), 12.0)
    truth = torch.randn(9, 16).bfloat16() if law else torch.arange(-1, 8)
    probs = (
        (truth.float() @ lm.float().T - 12).exp()
        if law
        else torch.eye(30)[truth] * (truth >= 0)[:, None]
    )
    given = [each.requires_grad_() for each in (states, said, answer)]
    wanted = -(probs * (states @ lm.float().T + said @ answer.T).log_softmax(-1)).sum() / 9
    loss = Compared.apply(*given, lm, truth, whole)
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-3)
    for one, other in zip(
        torch.autograd.grad(loss, given), torch.autograd.grad(wanted, given), strict=True
    ):
        assert (one - other).norm() < 0.02 * other.norm()


def test_exercises_are_signatures_with_a_docstring() -> None:
    docstring = '"""Return the sum of a and b, two numbers.\n\n    >>> add(1, 2)\n    3\n    """'
    code = f"def add(a, b):\n    {docstring}\n"
    text = f"Sure:\n```python\nimport math\n\n{code}    return a + b\n```"
    assert exercise(text) == ("add", code)
    assert exercise("def add(a, b):\n    return a + b") is None and exercise("No code") is None
