"""What an engine may take of the memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from forerun.cli import serve
from forerun.cli.options import ServingOptions
from forerun.cli.serve import ServerOptions
from forerun.server import memory
from forerun.server.memory import MemoryShare, default_prefix_bytes, weight_memory
from tests.support.serving import PLAIN, answered, figures, live, make_decoder, post
from tests.support.toys import save_models, tiny


def test_earlier_texts_have_room_for_a_context_within_what_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoder = make_decoder()  # of a target and a draft
    target = decoder.target
    assert target.context == 512
    whole = 512 * target.position_bytes
    free: dict[str, int | None] = {"bytes": None}

    def free_memory(device: torch.device) -> int | None:
        assert device == target.device
        return free["bytes"]

    def default(**share: Any) -> int:
        return default_prefix_bytes(decoder, MemoryShare(**share))

    monkeypatch.setattr(memory, "free_memory", free_memory)
    assert default() == 2**28  # a system that tells nothing
    free["bytes"] = 2**40
    assert default() == 2**28  # the least where there is room
    monkeypatch.setattr(memory, "DEFAULT_PREFIX_BYTES", 1000)
    assert default() == whole
    monkeypatch.setattr(memory, "PREFIX_TOKENS", 100)
    assert default() == 100 * target.position_bytes
    free["bytes"] = 8000
    assert default() == 1000 and default(part=0.5) == 500
    weights = weight_memory(decoder)
    free["bytes"] = 2**40
    assert default(limit=weights + 80) == 40 and default(limit=weights - 1) == 0
    assert default(limit=8 * weights, part=1 / weights) == 1


# {name: (files under /proc and /sys, bytes that the groups leave)}.
GROUPS = {
    "none": ({}, None),
    "that of a container": ({"memory.max": "900", "memory.current": "200"}, 700),
    "without a limit": ({"memory.max": "max", "memory.current": "200"}, None),
    "a service's": (
        {
            "memory.max": "max",
            "memory.current": "5000",
            "system.slice/a.service/memory.max": "900",
            "system.slice/a.service/memory.current": "300",
            "system.slice/a.service/memory.stat": "anon 200\ninactive_file 50\n",
            "system.slice/memory.max": "1000",
            "system.slice/memory.current": "990",
            "system.slice/memory.stat": "inactive_file 900\n",
        },
        650,
    ),
    "a tighter one around it": (
        {
            "system.slice/a.service/memory.max": "900",
            "system.slice/a.service/memory.current": "300",
            "system.slice/memory.max": "1000",
            "system.slice/memory.current": "990",
        },
        10,
    ),
    "of version 1": (
        {
            "memory/job/memory.limit_in_bytes": "900",
            "memory/job/memory.usage_in_bytes": "300",
            "memory/job/memory.stat": "inactive_file 7\ntotal_inactive_file 20\n",
        },
        620,
    ),
}


@pytest.mark.parametrize("name", GROUPS)
def test_all_control_groups_around_the_process_bound_its_memory(name: str, tmp_path: Path) -> None:
    files, left = GROUPS[name]
    texts = {f"sys/fs/cgroup/{path}": text for path, text in files.items()}
    texts["proc/self/cgroup"] = "5:cpu:/other\n4:memory:/job\n0::/system.slice/a.service\n"
    for path, text in texts.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    assert memory.free_memory(torch.device("cpu"), tmp_path) == left


def test_keys_and_values_take_half_of_what_earlier_texts_leave(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoder = make_decoder(prefix_bytes=100)
    monkeypatch.setattr(memory, "free_memory", lambda device: 10_000)
    taken = memory.prefix_memory(decoder)
    assert 100 < taken < 1000  # the draft keeps texts too
    assert memory.default_kv_memory(decoder, MemoryShare()) == (10_000 - taken) // 2
    assert memory.default_kv_memory(decoder, MemoryShare(0.5)) == (5000 - taken) // 2
    assert memory.default_kv_memory(decoder, MemoryShare(0.01)) == 25


def test_the_server_says_how_much_earlier_texts_take() -> None:
    body = {"prompt": "the cat sat on the mat", "max_tokens": 4, "temperature": 0}
    for given in (None, 0, 50_000):
        with live(lambda given=given: make_decoder(prefix_bytes=given)) as server:
            answered(post(server, PLAIN, body))
            decoder = server.worker.decoder
            assert decoder is not None
            limit = decoder.options.prefix_bytes
            assert limit == given or (given is None and (limit or 0) > 2**20)
            seen = figures(server)
            assert seen["forerun:prefix_cache_limit_bytes"] == limit
            taken = seen["forerun:prefix_cache_bytes"]
            assert 0 < taken <= limit if limit else taken == 0


@pytest.mark.parametrize(("given", "wanted"), [(None, None), (0, 0), (5, 5)])
def test_the_option_reaches_the_engine(given: int | None, wanted: int | None) -> None:
    options = ServerOptions(prefix_bytes=given)
    (served,) = serve.served_models(ServingOptions(target="embedded"), options)
    made: Any = serve._decoder_maker(served, options)
    assert made.args[2]["prefix_bytes"] == wanted


def test_files_of_drafts_and_trained_layers_count_before_a_load(tmp_path: Path) -> None:
    save_models(tmp_path, target=tiny("llama"), draft=tiny("llama", seed=1))
    sizes = {
        name: sum(file.stat().st_size for file in (tmp_path / name).glob("*.safetensors"))
        for name in ("target", "draft")
    }
    assert min(sizes.values()) > 1000
    target, draft = (str(tmp_path / name) for name in sizes)
    for more, wanted in (
        ({}, sizes["target"]),
        ({"draft": draft, "method": "sd"}, sum(sizes.values())),
        ({"draft": draft, "method": "suffix"}, sizes["target"]),  # the draft is not loaded
    ):
        (served,) = serve.served_models(ServingOptions(target=target, **more), ServerOptions())
        assert serve._file_bytes(served) == wanted
    (served,) = serve.served_models(ServingOptions(target="embedded"), ServerOptions())
    alone = serve.ModelSource.parse("embedded", "target").file_bytes
    assert serve._file_bytes(served) > alone > 0
