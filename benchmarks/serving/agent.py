"""A session of an agent with tools, 20 turns over a small code base: plain decoding beside drafts.

    python -m benchmarks.serving.agent --out benchmarks/serving/agent.json --page docs/results/agent.md
    python -m benchmarks.serving.agent --session long --methods ar,suffix,hybrid,llama-cpp \
        --out benchmarks/serving/agent-long.json --page docs/results/agent-long.md

`--session long` reads and writes files of the standard library until the text has about 8,000 tokens. llama.cpp, by the
names of `benchmarks.peers.runners`, is given the turns of `ar`, which must come before it: the same prompts, and as many tokens
as each turn has. It keeps what it has read, decodes without the grammar of calls, and its tokens are not looked at.

The user's words and the function of each turn are given; arguments and texts are the model's own, greedily, and tools
work on files in memory. So each method has the same session, token for token, or the script ends with status 1. A
session that is in the file is not run again. Models are loaded anew for each, so that none finds what another has
left; the first thing each decodes is not counted. The guard is on.
"""

from __future__ import annotations

import argparse
import gc
import json
import shlex
from pathlib import Path
from time import perf_counter
from typing import Any

import forerun
from benchmarks.peers.runners import is_llama, llama_mode
from forerun.bench.report import provenance
from forerun.engine.stats import summarise
from forerun.files import write_text
from forerun.model.prefix_store import common
from forerun.text.chat import chat_prompt

METHODS = "ar,suffix,hybrid"
FILES = {
    "shapes.py": """class Shape:
    def __init__(self, name):
        self.name = name


class Rect(Shape):
    def __init__(self, width, height):
        super().__init__("rect")
        self.width = width
        self.height = height

    def area(self):
        return self.width + self.height
""",
    "test_shapes.py": """from shapes import Rect


def test_area():
    assert Rect(2, 3).area() == 6
""",
    "report.py": """from shapes import Rect


def report(shapes):
    for shape in shapes:
        print(shape.name, shape.area())


report([Rect(1, 2), Rect(3, 4)])
""",
}
SYSTEM = (
    "You are a coding agent. You work on a small Python project, by tools only. Write short code."
)
# What the user says, if anything, and the function that is called; None: an answer in words.
TURNS: list[tuple[str | None, str | None]] = [
    ("The tests fail. See which files there are.", "list_files"),
    (None, "run_tests"),
    ("Read shapes.py.", "read_file"),
    ("Read test_shapes.py.", "read_file"),
    ("Mend area in shapes.py: write the whole file.", "write_file"),
    (None, "run_tests"),
    ("Say in two sentences what was wrong.", None),
    ("Add a method perimeter to Rect: write the whole of shapes.py.", "write_file"),
    ("Add a test of perimeter: write the whole of test_shapes.py.", "write_file"),
    (None, "run_tests"),
    ("Read report.py.", "read_file"),
    ("Let it print the perimeter too: write the whole of report.py.", "write_file"),
    ("Add a docstring to every method of Rect: write the whole of shapes.py.", "write_file"),
    (None, "run_tests"),
    ("Rename Rect to Rectangle in shapes.py: write the whole file.", "write_file"),
    ("Rename it in test_shapes.py: write the whole file.", "write_file"),
    ("Rename it in report.py: write the whole file.", "write_file"),
    (None, "run_tests"),
    ("Read shapes.py again.", "read_file"),
    ("Say in three sentences what was changed.", None),
]
MOST = {"short": 220, "long": 1100}  # tokens of a turn
PROJECT = Path(__file__).with_name("project.json")
CHANGES = (
    "Add type hints to every function of {file}: write the whole file.",
    "Add a docstring to every function of {file}: write the whole file.",
    "Rename one variable of {file} so that it is easier to read: write the whole file.",
)
Turns = list[tuple[str | None, str | None]]


def project(name: str) -> tuple[dict[str, str], Turns]:
    """Return the files and the turns of a session."""
    if name == "short":
        return dict(FILES), TURNS
    files = json.loads(PROJECT.read_text(encoding="utf-8"))
    turns: Turns = [("See which files there are.", "list_files")]
    for number, file in enumerate(files):
        turns.append((f"Read {file}.", "read_file"))
        turns.append(("Say in a few sentences what it does, and what could go wrong in it.", None))
        turns.append((CHANGES[number % len(CHANGES)].format(file=file), "write_file"))
    return files, turns


def _tool(name: str, about: str, **properties: Any) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }
    return {
        "type": "function",
        "function": {"name": name, "description": about, "parameters": schema},
    }


def tools_for(files: dict[str, str]) -> list[dict[str, Any]]:
    path = {"enum": sorted(files)}
    return [
        _tool("list_files", "List the files of the project."),
        _tool("read_file", "Read a file.", path=path),
        _tool("write_file", "Write a whole file.", path=path, content={"type": "string"}),
        _tool("run_tests", "Run all tests."),
    ]


def run_tool(files: dict[str, str], name: str, given: dict[str, Any]) -> str:
    """Return what a tool says. Tests are not run: the result is whether the sum is gone."""
    if name == "list_files":
        return "\n".join(sorted(files))
    if name == "read_file":
        return files[given["path"]]
    if name == "write_file":
        files[given["path"]] = given["content"]
        return f"wrote {len(given['content'])} characters to {given['path']}"
    if "width + self.height\n" in files["shapes.py"].replace("2 * (self.", ""):
        return "test_shapes.py F\n    assert Rect(2, 3).area() == 6\nE   assert 5 == 6\n1 failed"
    return f"test_shapes.py {'.' * files['test_shapes.py'].count('def test_')}\nall passed"


def session(decoder: forerun.Decoder, name: str = "short") -> list[dict[str, Any]]:
    """Return the turns of a session: what was said and called, its tokens, and figures."""
    (files, turns), found = project(name), list[dict[str, Any]]()
    tools, before = tools_for(files), list[int]()
    messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}]
    for number, (said, function) in enumerate(turns, 1):
        if said is not None:
            messages.append({"role": "user", "content": said})
        choice = (
            "none" if function is None else {"type": "function", "function": {"name": function}}
        )
        prompt = chat_prompt(decoder.tokenizer, messages, tools=tools)
        begun, chunks, times = perf_counter(), list[forerun.Chunk](), list[float]()
        for chunk in decoder.stream_chat(
            messages, tools=tools, tool_choice=choice, max_new_tokens=MOST[name]
        ):
            chunks.append(chunk)
            times.append(perf_counter())
        output = [token for chunk in chunks for token in chunk.step.tokens]
        called = chunks[-1].tool_calls
        text = "" if called else "".join(chunk.text for chunk in chunks)
        calls = [
            {"id": f"call_{number}", "type": "function", "function": vars(call)} for call in called
        ]
        messages.append(
            {"role": "assistant", "content": text} | ({"tool_calls": calls} if calls else {})
        )
        for call in calls:
            said_back = run_tool(
                files, call["function"]["name"], json.loads(call["function"]["arguments"])
            )
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": said_back})
        if function is not None and not calls:  # cut off by the length
            messages.append({"role": "user", "content": "The call was too long. Go on."})
        turn = {
            "function": function,
            "tokens": len(output),
            "text": text,
            "calls": [vars(call) for call in called],
        }
        turn |= {
            "seconds": round(times[-1] - begun, 4),
            "decoding_seconds": round(times[-1] - times[0], 4),
        }
        turn |= {
            "decoded": len(output) - len(chunks[0].step.tokens),
            "output": " ".join(map(str, output)),
        }
        kept = common(before, prompt)
        turn |= {
            "keeps": kept,
            "adds": " ".join(map(str, prompt[kept:])),
            "context": len(prompt) + len(output),
        }
        before = prompt
        found.append(
            turn
            | {"stats": summarise([chunk.step for chunk in chunks], times[-1] - begun).as_dict()}
        )
        print(f"  turn {number}: {len(output)} tokens in {times[-1] - begun:.1f} s", flush=True)
    return found


def llama_session(name: str, turns: list[dict[str, Any]], target: str) -> list[dict[str, Any]]:
    """Return the same turns by llama.cpp."""
    import torch

    from benchmarks.peers.llama import STEP, LlamaCpp
    from forerun.sampling.params import SamplingParams
    from forerun.zoo import locate, own_draft
    from forerun.zoo.gguf_file import find

    models = {"target": find(locate(target, "target"))}
    if "draft" in llama_mode(name):
        models["draft"] = find(locate(str(own_draft(target)), "draft"))
    length = -(-(max(turn["context"] for turn in turns) + 64) // STEP) * STEP
    files = {part: str(file) for part, file in models.items()}
    given = files | {"length": length, "threads": torch.get_num_threads()}
    peer, found = LlamaCpp(given, SamplingParams(), set()), list[dict[str, Any]]()
    prompt = list(map(int, turns[0]["adds"].split()))
    peer.turn(name, prompt[:16], 16)  # the first thing is not counted
    for number, turn in enumerate(turns, 1):
        prompt = prompt[: turn["keeps"]] + list(map(int, turn["adds"].split()))
        own = peer.turn(name, prompt, turn["tokens"])
        stats = {"target_forwards": own["forwards"], "tested": 0, "accepted": 0}
        times = {
            "seconds": round(own["seconds"], 4),
            "decoding_seconds": round(own["seconds"] - own["first"], 4),
        }
        kept = {part: turn[part] for part in ("function", "tokens", "context")}
        found.append(kept | times | {"decoded": turn["tokens"] - 1, "stats": stats})
        print(f"  turn {number}: {turn['tokens']} tokens in {own['seconds']:.1f} s", flush=True)
    peer.process.kill()
    return found


def figures(turns: list[dict[str, Any]]) -> dict[str, float]:
    """Return the figures of a session: of whole turns, and of decoding, from a turn's first tokens to its last."""
    names = ("tokens", "seconds", "decoded", "decoding_seconds")
    tokens, seconds, decoded, decoding = (sum(turn[name] for turn in turns) for name in names)
    counts = {
        name: sum(turn["stats"][name] for turn in turns)
        for name in ("target_forwards", "tested", "accepted")
    }
    return {
        "tokens": tokens,
        "seconds": round(seconds, 3),
        "tokens_per_s": round(tokens / seconds, 2),
        "decoding_tokens_per_s": round(decoded / decoding, 2),
        "tau": round(tokens / counts["target_forwards"], 3),
        "alpha": round(counts["accepted"] / max(1, counts["tested"]), 3),
    }


def page(results: dict[str, Any]) -> str:
    """Return the page of results."""
    versions, sessions = results["versions"], results["sessions"]
    first = sessions[0]["turns"]
    where = f"{versions['gpu'] or versions['cpu']}, {versions['threads']} threads, kernels {versions['kernels']}"
    where += f", torch {versions['torch']}, transformers {versions['transformers']}, {versions['commit']}"
    lines = [
        "# An agent's session",
        "",
        f"{results['date']}, {where}.",
        "",
        "```",
        results["command"],
        "```",
        "",
    ]
    lines += [
        f"{len(first)} turns with tools on `{results['arguments']['target']}`, greedily, guard on, until the text has "
        f"{first[-1].get('context', 0)} tokens: files are listed, "
        "read and written anew, tests are run. The function of each turn is given; the rest is the model's. "
        "All methods of forerun have the same session, token for token. Seconds are of whole turns, with what is read "
        "and the grammar of the call; decoding is from a turn's first tokens to its last.",
        "",
        "| method | tokens/s | over `ar` | decoding, tokens/s | over `ar` | tau | alpha | tokens | seconds |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    methods = list(dict.fromkeys(each["method"] for each in sessions))
    of = {name: [each for each in sessions if each["method"] == name] for name in methods}
    told = {name: [each["figures"] for each in own] for name, own in of.items()}
    best = {name: max(own, key=lambda each: each["tokens_per_s"]) for name, own in told.items()}
    plain = best.get("ar", best[methods[0]])
    rates = ("tokens_per_s", "decoding_tokens_per_s")
    for name, own in best.items():
        speeds = " | ".join(f"{own[rate]:.1f} | {own[rate] / plain[rate]:.2f}" for rate in rates)
        rest = f"{own['tau']:.2f} | {own['alpha']:.2f} | {own['tokens']} | {own['seconds']:.1f}"
        lines.append(f"| `{name}` | {speeds} | {rest} |")
    if any(map(is_llama, methods)):
        lines += [
            "",
            "llama.cpp has the turns of `ar`: the same prompts, as many tokens, without the grammar of calls. It keeps "
            "what it has read.",
        ]
    if max(map(len, of.values())) > 1:
        lines += ["", f"The fastest of {max(map(len, of.values()))} rounds each."]
    lines += [
        "",
        "By turn, tokens/s:",
        "",
        f"| turn | function | text so far | tokens | {' | '.join(f'`{name}`' for name in methods)} |",
    ]
    lines.append("|---|---|---:|---:|" + "---:|" * len(methods))
    for at, said in enumerate(first):
        turns = [of[name][0]["turns"][at] for name in methods]
        speeds = " | ".join(f"{turn['tokens'] / turn['seconds']:.1f}" for turn in turns)
        about = f"{said['function'] or 'words'} | {said.get('context', '')} | {said['tokens']}"
        lines.append(f"| {at + 1} | {about} | {speeds} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="qwen-coder")
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--session", choices=sorted(MOST), default="short")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--page", type=Path)
    asked = parser.parse_args()
    if asked.threads is not None:
        import torch

        torch.set_num_threads(asked.threads)
    given = {
        name: getattr(asked, name) for name in ("target", "methods", "session", "rounds", "threads")
    }
    results: dict[str, Any] = {"sessions": []}
    if asked.out.is_file():
        results = json.loads(asked.out.read_text(encoding="utf-8"))
        if results["arguments"] != given:
            parser.error(f"{asked.out} was made with other arguments: give another --out")
    command = [
        "python",
        "-m",
        "benchmarks.serving.agent",
        "--target",
        asked.target,
        "--methods",
        asked.methods,
    ]
    command += ["--session", asked.session, "--rounds", str(asked.rounds), "--out", "RESULTS.json"]
    names = asked.methods.split(",")
    if any(map(is_llama, names)) and names[0] != "ar":
        parser.error("--methods: llama.cpp has the turns of `ar`, so that must come first")
    for number in range(asked.rounds):
        for name in (
            names[number % len(names) :] + names[: number % len(names)]
        ):  # each round begins with another
            if any(
                (each["method"], each["round"]) == (name, number) for each in results["sessions"]
            ):
                continue
            print(f"round {number + 1}, {name}", flush=True)
            if is_llama(name):
                plain = next(each for each in results["sessions"] if each["method"] == "ar")
                turns = llama_session(name, plain["turns"], asked.target)
            else:
                decoder = forerun.load(asked.target, method=name)
                decoder.chat([{"role": "user", "content": "Write a haiku."}], max_new_tokens=24)
                turns = session(decoder, asked.session)
                del decoder
            results["sessions"].append(
                {"method": name, "round": number, "figures": figures(turns), "turns": turns}
            )
            results |= provenance(given) | {"command": shlex.join(command)}
            asked.out.parent.mkdir(parents=True, exist_ok=True)
            write_text(asked.out, json.dumps(results, indent=1) + "\n")
            print(f"  {results['sessions'][-1]['figures']}", flush=True)
            gc.collect()
    ours = [each["turns"] for each in results["sessions"] if not is_llama(each["method"])]
    outputs = [[turn["output"] for turn in turns] for turns in ours]
    if any(each != outputs[0] for each in outputs):
        print("the sessions are not the same, token for token")
        return 1
    if asked.page is not None:
        write_text(asked.page, page(results))
        print(asked.page)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
