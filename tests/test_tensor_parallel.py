"""A target split among two processes says what it says in one. One job of torchrun does it all: it is slow to start."""

import json
import os
import signal
import subprocess
import sys
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

import forerun
from forerun.backends import costs, tensor_parallel
from forerun.cli import main

PROMPTS = ["def add(a, b):", "the cat sat"]
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 0.9, "seed": 7},
    "top_p": {"temperature": 1.2, "top_p": 0.9, "seed": 2},
    "unseeded": {"temperature": 0.9},
}
METHODS: dict[str, dict[str, Any]] = {
    "ar": {},
    "sd": {"gamma": 3, "guard": True},  # by the first rank's clock
    "pacer": {"pre_verifier": "layer", "guard": False},
    "lyanna": {"head": "head", "width": 2, "guard": False},
}
TOKENS = 24
COMMAND = ["def add(a, b):", "--method", "sd", "--gamma", "3", "--max-new-tokens", "100", "--temperature", "1"]
COMMAND += ["--draft-weights", "float32", "--no-guard"]

pytestmark = pytest.mark.timeout(900)  # the job starts three processes that import torch


def decode(folder: Path, **options: Any) -> dict[str, Any]:
    """Tokens by method and way."""
    costs.SECONDS = 0.05
    found: dict[str, Any] = {}
    for name, settings in METHODS.items():
        own = {key: folder / value if isinstance(value, str) else value for key, value in settings.items()}
        own |= {} if name in ("ar", "lyanna") else {"draft": folder / "draft"}
        torch.manual_seed(11 + int(os.environ.get("RANK", 0)))  # as a user may: the first rank's counts
        decoder = forerun.load(folder / "target", method=name, max_rows=2, draft_weights="float32", **own, **options)
        for way, asked in WAYS.items():
            prompts = PROMPTS if way == "greedy" else PROMPTS[:1]
            completions = decoder.generate(prompts, max_new_tokens=TOKENS, **asked)
            found[f"{name} {way}"] = [completion.tokens for completion in completions]
        found[f"{name} drafted"] = completions[0].stats.drafted
    return found


def rank(folder: Path) -> None:
    """What each process of the job does."""
    torch.set_num_threads(1)
    own = int(os.environ["RANK"])
    found = decode(folder, tensor_parallel=True)
    (folder / f"rank{own}.json").write_text(json.dumps(found))
    with pytest.raises(ValueError, match="weights in few bits cannot be split"):
        forerun.load("embedded", tensor_parallel=True, method="ar")
    with pytest.raises(ValueError, match="num_key_value_heads 1, which 2 ranks cannot split evenly"):
        forerun.load(folder / "odd", tensor_parallel=True, method="ar")
    with pytest.raises(ValueError, match="give tensor_parallel or a device"):
        forerun.load(folder / "target", tensor_parallel=True, device="cpu", method="ar")
    sys.argv = ["forerun", "generate", *COMMAND, "--seed", "3", "--json", "--tensor-parallel"]
    sys.argv += ["--target", str(folder / "target"), "--draft", str(folder / "draft")]
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    if own == 1:  # killed from without between two forwards, in the middle of an output
        barrier, calls = tensor_parallel.Ranks.barrier, count(1)

        def counted(ranks: tensor_parallel.Ranks, place: bytes) -> float:
            if next(calls) == 40:
                os.kill(os.getpid(), signal.SIGKILL)
            return barrier(ranks, place)

        tensor_parallel.Ranks.barrier = counted  # type: ignore[method-assign]
    main()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import toys  # the ranks are quicker without

    target = toys.tiny("llama", 3, vocab=len(toys.tiny_tokenizer()))
    draft = toys.noisy_copy(target, 0.02)
    path = toys.save_models(tmp_path_factory.mktemp("split"), target=target, draft=draft, odd=target)
    config = path / "odd" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_key_value_heads": 1}))
    toys.random_layer(target, draft).save_pretrained(path / "layer")
    toys.random_head(forerun.model.causal_lm.CausalLM(target), hot=64).save_pretrained(path / "head")
    return path


@pytest.mark.slow
def test_two_ranks_say_what_one_process_says(folder: Path) -> None:
    """A command prints its answer once, and a killed rank ends the job with one line."""
    pytest.importorskip("accelerate", reason="accelerate, by which transformers splits weights, is not installed")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "tests.test_tensor_parallel", str(folder)]
    variables = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([".", *sys.path[1:]])}
    root = Path(__file__).parent.parent
    job = subprocess.run(command, capture_output=True, text=True, timeout=800, env=variables, cwd=root)
    found = [folder / f"rank{number}.json" for number in (0, 1)]
    assert all(path.exists() for path in found), job.stderr
    first, second = (json.loads(path.read_text()) for path in found)
    assert first == second
    alone = decode(folder, device="cpu", fast=False)
    for name in METHODS:
        for way in WAYS:
            key = f"{name} {way}"
            # Without a seed the draws depend on the drafts, and these on the clock.
            fixed = way != "unseeded" or name == "ar"
            assert not fixed or first[key] == alone[key] == first[f"ar {way}"], key
            assert all(len(tokens) == TOKENS for tokens in first[key])
    assert all(first[f"{name} drafted"] > 0 for name in ("pacer", "lyanna"))
    (line,) = job.stdout.splitlines()
    plain = forerun.load(folder / "target", method="ar", fast=False)
    assert json.loads(line)["tokens"] == plain.generate(COMMAND[0], max_new_tokens=100, temperature=1.0, seed=3).tokens
    assert job.returncode != 0
    (line,) = [line for line in job.stderr.splitlines() if line.startswith("forerun:")]
    assert line.startswith("forerun: tensor parallel rank 0 of 2 stops: "), line


def test_mistakes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)

    def refused(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["forerun", "generate", *arguments, "--tensor-parallel"])
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr().err
        assert ended.value.code == 2 and printed.count("\n") == 1
        return printed

    assert "needs at least 2 processes" in refused("hello", "--target", "embedded")
    assert "stdin has one reader" in refused("-")
    with pytest.raises(ValueError, match="torchrun --nproc-per-node 2"):
        forerun.load(tensor_parallel=True)


def test_errors_of_the_network_are_told_apart() -> None:
    for error, is_lost in (
        (torch.distributed.DistStoreError("wait timed out"), True),
        (RuntimeError("[../gloo/pair.cc:538] Connection closed by peer [127.0.0.1]:1234"), True),
        (RuntimeError("NCCL communicator was aborted on rank 0"), True),
        (RuntimeError("Gloo connectFullMesh failed with [../gloo/transport/tcp/pair.cc:144] no error"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (RuntimeError("CUDA error: peer access is not supported between these two devices"), False),
        (RuntimeError("[../aten/src/ATen/native/socket.cpp:1] timeout must be above 0"), False),
    ):
        with pytest.raises(RuntimeError) as caught, tensor_parallel.network():
            raise error
        assert isinstance(caught.value, tensor_parallel.RankLostError) == is_lost
        assert not is_lost or str(caught.value).endswith(str(error).split("] ", 1)[-1])


@pytest.mark.parametrize(("gpus", "message"), [(0, "needs the package accelerate"), (1, "a GPU each; there are 1")])
def test_what_a_machine_lacks_is_reported_once(monkeypatch: pytest.MonkeyPatch, gpus: int, message: str) -> None:
    store, before = torch.distributed.HashStore(), signal.getsignal(signal.SIGTERM)
    names = dict.fromkeys(("MASTER_ADDR", "MASTER_PORT"), "") | {"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2"}
    monkeypatch.setattr(tensor_parallel, "_store", None)
    monkeypatch.setattr(tensor_parallel, "is_accelerate_available", lambda: gpus > 0)
    monkeypatch.setattr(tensor_parallel.distributed, "rendezvous", lambda *_, **__: iter([(store, 0, 2)]))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(os, "_exit", sys.exit)
    try:
        for own, raised in (("1", ValueError), ("0", SystemExit)):
            for name, value in (names | {"RANK": own, "LOCAL_RANK": own}).items():
                monkeypatch.setenv(name, value)
            with pytest.raises(raised, match=message if raised is ValueError else "2"), tensor_parallel.together():
                pass
    finally:
        signal.signal(signal.SIGTERM, before)


def test_ranks_that_differ_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks see each other's place before anything is run."""
    ranks, other = tensor_parallel.Ranks(0, 2, None), 0

    def gather(found: list[torch.Tensor], own: torch.Tensor, group: object) -> None:
        found[0].copy_(own)
        found[1].copy_(own + torch.tensor([other, 5]))

    monkeypatch.setattr(tensor_parallel.distributed, "all_gather", gather)
    assert ranks.clock() > 0
    other = 1
    with pytest.raises(tensor_parallel.RankLostError, match="rank 1 was about to do something else"):
        ranks.clock()


if __name__ == "__main__":
    rank(Path(sys.argv[1]))
