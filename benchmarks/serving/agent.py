"""A session of an agent with tools, 20 turns over a small code base: plain decoding beside drafts.

    python -m benchmarks.serving.agent --out benchmarks/qwen-coder/agent.json --page docs/results/agent.md

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
from forerun.bench.report import provenance
from forerun.engine.stats import summarise
from forerun.files import write_text

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
SYSTEM = "You are a coding agent. You work on a small Python project, by tools only. Write short code."
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
MOST = 220  # tokens of a turn


def _tool(name: str, about: str, **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": about, "parameters": schema}}


_PATH = {"enum": sorted(FILES)}
TOOLS = [
    _tool("list_files", "List the files of the project."),
    _tool("read_file", "Read a file.", path=_PATH),
    _tool("write_file", "Write a whole file.", path=_PATH, content={"type": "string"}),
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


def session(decoder: forerun.Decoder) -> list[dict[str, Any]]:
    """Return the turns of a session: what was said and called, its tokens, and figures."""
    files, found = dict(FILES), list[dict[str, Any]]()
    messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}]
    for number, (said, function) in enumerate(TURNS, 1):
        if said is not None:
            messages.append({"role": "user", "content": said})
        choice = "none" if function is None else {"type": "function", "function": {"name": function}}
        begun, chunks, times = perf_counter(), list[forerun.Chunk](), list[float]()
        for chunk in decoder.stream_chat(messages, tools=TOOLS, tool_choice=choice, max_new_tokens=MOST):
            chunks.append(chunk)
            times.append(perf_counter())
        output = [token for chunk in chunks for token in chunk.step.tokens]
        called = chunks[-1].tool_calls
        text = "" if called else "".join(chunk.text for chunk in chunks)
        calls = [{"id": f"call_{number}", "type": "function", "function": vars(call)} for call in called]
        messages.append({"role": "assistant", "content": text} | ({"tool_calls": calls} if calls else {}))
        for call in calls:
            said_back = run_tool(files, call["function"]["name"], json.loads(call["function"]["arguments"]))
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": said_back})
        if function is not None and not calls:  # cut off by the length
            messages.append({"role": "user", "content": "The call was too long. Go on."})
        turn = {"function": function, "tokens": len(output), "text": text, "calls": [vars(call) for call in called]}
        turn |= {"seconds": round(times[-1] - begun, 4), "decoding_seconds": round(times[-1] - times[0], 4)}
        turn |= {"decoded": len(output) - len(chunks[0].step.tokens), "output": " ".join(map(str, output))}
        found.append(turn | {"stats": summarise([chunk.step for chunk in chunks], times[-1] - begun).as_dict()})
        print(f"  turn {number}: {len(output)} tokens in {times[-1] - begun:.1f} s", flush=True)
    return found


def figures(turns: list[dict[str, Any]]) -> dict[str, float]:
    """Return the figures of a session: of whole turns, and of decoding, from a turn's first tokens to its last."""
    names = ("tokens", "seconds", "decoded", "decoding_seconds")
    tokens, seconds, decoded, decoding = (sum(turn[name] for turn in turns) for name in names)
    counts = {name: sum(turn["stats"][name] for turn in turns) for name in ("target_forwards", "tested", "accepted")}
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
    where = f"{versions['gpu'] or versions['cpu']}, {versions['threads']} threads, kernels {versions['kernels']}"
    where += f", torch {versions['torch']}, transformers {versions['transformers']}, {versions['commit']}"
    lines = ["# An agent's session", "", f"{results['date']}, {where}.", "", "```", results["command"], "```", ""]
    lines += [
        f"{len(TURNS)} turns with tools on `{results['arguments']['target']}`, greedily, guard on: files are listed, "
        "read and written anew, tests are run. The function of each turn is given; the rest is the model's. "
        "All methods have the same session, token for token. Seconds are of whole turns, with what is read and the "
        "grammar of the call; decoding is from a turn's first tokens to its last.",
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
    if max(map(len, of.values())) > 1:
        lines += ["", f"The fastest of {max(map(len, of.values()))} rounds each."]
    lines += [
        "",
        "By turn, tokens/s:",
        "",
        f"| turn | function | tokens | {' | '.join(f'`{name}`' for name in methods)} |",
    ]
    lines.append("|---|---|---:|" + "---:|" * len(methods))
    for at, (_, function) in enumerate(TURNS):
        turns = [of[name][0]["turns"][at] for name in methods]
        speeds = " | ".join(f"{turn['tokens'] / turn['seconds']:.1f}" for turn in turns)
        lines.append(f"| {at + 1} | {function or 'words'} | {turns[0]['tokens']} | {speeds} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="qwen-coder")
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--page", type=Path)
    asked = parser.parse_args()
    if asked.threads is not None:
        import torch

        torch.set_num_threads(asked.threads)
    given = {name: getattr(asked, name) for name in ("target", "methods", "rounds", "threads")}
    results: dict[str, Any] = {"sessions": []}
    if asked.out.is_file():
        results = json.loads(asked.out.read_text(encoding="utf-8"))
        if results["arguments"] != given:
            parser.error(f"{asked.out} was made with other arguments: give another --out")
    command = ["python", "-m", "benchmarks.serving.agent", "--target", asked.target, "--methods", asked.methods]
    command += ["--rounds", str(asked.rounds), "--out", "RESULTS.json"]
    names = asked.methods.split(",")
    for number in range(asked.rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:  # each round begins with another
            if any((each["method"], each["round"]) == (name, number) for each in results["sessions"]):
                continue
            print(f"round {number + 1}, {name}", flush=True)
            decoder = forerun.load(asked.target, method=name)
            decoder.chat([{"role": "user", "content": "Write a haiku."}], max_new_tokens=24)
            turns = session(decoder)
            results["sessions"].append({"method": name, "round": number, "figures": figures(turns), "turns": turns})
            results |= provenance(given) | {"command": shlex.join(command)}
            asked.out.parent.mkdir(parents=True, exist_ok=True)
            write_text(asked.out, json.dumps(results, indent=1) + "\n")
            print(f"  {results['sessions'][-1]['figures']}", flush=True)
            del decoder
            gc.collect()
    outputs = [[turn["output"] for turn in each["turns"]] for each in results["sessions"]]
    if any(each != outputs[0] for each in outputs):
        print("the sessions are not the same, token for token")
        return 1
    if asked.page is not None:
        write_text(asked.page, page(results))
        print(asked.page)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
