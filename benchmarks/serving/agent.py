"""A session of an agent with tools, 20 turns over a small code base: plain decoding beside drafts.

    python -m benchmarks.serving.agent --out runs/agent.json --page runs/agent.md
    python -m benchmarks.serving.agent --session long --methods ar,suffix,hybrid,llama-cpp \
        --out benchmarks/serving/agent.json --page docs/results/agent.md

`--session long` reads and writes files of the standard library until the text has about 8,000
tokens. llama.cpp, by the names of `benchmarks.peers.runners`, is given the turns of `ar`, which
must come before it: the same prompts, and as many tokens as each turn has. It keeps what it has
read, decodes without the grammar of calls, and its tokens are not compared.

The user's words and the function of each turn are given; arguments and texts are the model's own,
greedily, and tools work on files in memory. So each method has the same session, token for token,
or the script ends with status 1. A session that is in the file is not run again. Models are loaded
anew for each session, so that none finds what another has left; the first output of each is not
counted. The guard is on.
"""

from __future__ import annotations

import argparse
import gc
import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
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

Turn = dict[str, Any]
Session = dict[str, Any]
Steps = list[tuple[str | None, str | None]]

DEFAULT_METHODS = "ar,suffix,hybrid"
SYSTEM = (
    "You are a coding agent. You work on a small Python project, by tools only. Write short code."
)
SHORT_FILES = {
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
# What the user says, if anything, and the function that is called; None is an answer in words.
SHORT_STEPS: Steps = [
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
MOST_TOKENS = {"short": 220, "long": 1100}  # of a turn
LLAMA_SPARE = 64  # positions of llama.cpp's context beyond those of the longest turn
PROJECT = Path(__file__).with_name("project.json")
CHANGES = (
    "Add type hints to every function of {file}: write the whole file.",
    "Add a docstring to every function of {file}: write the whole file.",
    "Rename one variable of {file} so that it is easier to read: write the whole file.",
)
OPTIONS = ("target", "methods", "session", "rounds", "threads")  # that a file of results keeps


def project(name: str) -> tuple[dict[str, str], Steps]:
    """Return the files and the steps of a session."""
    if name == "short":
        return dict(SHORT_FILES), SHORT_STEPS
    files = json.loads(PROJECT.read_text(encoding="utf-8"))
    steps: Steps = [("See which files there are.", "list_files")]
    for number, file in enumerate(files):
        steps.append((f"Read {file}.", "read_file"))
        steps.append(("Say in a few sentences what it does, and what could go wrong in it.", None))
        steps.append((CHANGES[number % len(CHANGES)].format(file=file), "write_file"))
    return files, steps


def _tool(name: str, about: str, **properties: Any) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }
    function = {"name": name, "description": about, "parameters": schema}
    return {"type": "function", "function": function}


def tools_for(files: dict[str, str]) -> list[dict[str, Any]]:
    path = {"enum": sorted(files)}
    return [
        _tool("list_files", "List the files of the project."),
        _tool("read_file", "Read a file.", path=path),
        _tool("write_file", "Write a whole file.", path=path, content={"type": "string"}),
        _tool("run_tests", "Run all tests."),
    ]


def run_tool(files: dict[str, str], name: str, arguments: dict[str, Any]) -> str:
    """Return what a tool says. Tests are not run: they pass if the wrong sum is gone."""
    if name == "list_files":
        return "\n".join(sorted(files))
    if name == "read_file":
        return files[arguments["path"]]
    if name == "write_file":
        files[arguments["path"]] = arguments["content"]
        return f"wrote {len(arguments['content'])} characters to {arguments['path']}"
    if "width + self.height\n" in files["shapes.py"].replace("2 * (self.", ""):
        return "test_shapes.py F\n    assert Rect(2, 3).area() == 6\nE   assert 5 == 6\n1 failed"
    return f"test_shapes.py {'.' * files['test_shapes.py'].count('def test_')}\nall passed"


@dataclass(frozen=True)
class Output:
    """The answer of one turn.

    Attributes:
        times: when each chunk was there.
        started_at: when the turn began.
    """

    chunks: list[forerun.Chunk]
    times: list[float]
    started_at: float

    @property
    def tokens(self) -> list[int]:
        return [token for chunk in self.chunks for token in chunk.step.tokens]

    @property
    def calls(self) -> Sequence[Any]:
        return self.chunks[-1].tool_calls

    @property
    def text(self) -> str:
        return "" if self.calls else "".join(chunk.text for chunk in self.chunks)


class Agent:
    """A session with a decoder.

    Attributes:
        files: the project, as the tools have changed it.
        messages: the conversation so far.
        turns: what was said and called, with its tokens and figures.
    """

    def __init__(self, decoder: forerun.Decoder, name: str) -> None:
        self.decoder = decoder
        self.files, self.steps = project(name)
        self.most_tokens = MOST_TOKENS[name]
        self.tools = tools_for(self.files)
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}]
        self.turns: list[Turn] = []
        self._prompt: list[int] = []  # of the turn before

    def run(self) -> list[Turn]:
        """Run all turns, and return them."""
        for said, function in self.steps:
            self.turn(said, function)
        return self.turns

    def turn(self, said: str | None, function: str | None) -> None:
        """Say something, let the model answer or call a function, and run what it calls."""
        if said is not None:
            self.messages.append({"role": "user", "content": said})
        prompt = chat_prompt(self.decoder.tokenizer, self.messages, tools=self.tools)
        output = self.answer(function)
        self.reply(output)
        self.turns.append(self.record(function, prompt, output))
        self._prompt = prompt
        seconds = output.times[-1] - output.started_at
        print(
            f"  turn {len(self.turns)}: {len(output.tokens)} tokens in {seconds:.1f} s", flush=True
        )
        if function is not None and not output.calls:  # the length cut it off
            self.messages.append({"role": "user", "content": "The call was too long. Go on."})

    def answer(self, function: str | None) -> Output:
        """Return the model's answer, which is a call of the function if there is one."""
        choice: Any = "none"
        if function is not None:
            choice = {"type": "function", "function": {"name": function}}
        chunks: list[forerun.Chunk] = []
        times: list[float] = []
        started_at = perf_counter()
        for chunk in self.decoder.stream_chat(
            self.messages,
            tools=self.tools,
            tool_choice=choice,
            max_new_tokens=self.most_tokens,
        ):
            chunks.append(chunk)
            times.append(perf_counter())
        return Output(chunks, times, started_at)

    def reply(self, output: Output) -> None:
        """Add the answer and the results of its calls to the conversation."""
        name = f"call_{len(self.turns) + 1}"
        calls = [{"id": name, "type": "function", "function": vars(call)} for call in output.calls]
        message: dict[str, Any] = {"role": "assistant", "content": output.text}
        if calls:
            message["tool_calls"] = calls
        self.messages.append(message)
        for call in output.calls:
            result = run_tool(self.files, call.name, json.loads(call.arguments))
            self.messages.append({"role": "tool", "tool_call_id": name, "content": result})

    def record(self, function: str | None, prompt: list[int], output: Output) -> Turn:
        """Return a turn as it is written."""
        tokens = output.tokens
        seconds = output.times[-1] - output.started_at
        keeps = common(self._prompt, prompt)
        return {
            "function": function,
            "tokens": len(tokens),
            "text": output.text,
            "calls": [vars(call) for call in output.calls],
            "seconds": round(seconds, 4),
            "decoding_seconds": round(output.times[-1] - output.times[0], 4),
            "decoded": len(tokens) - len(output.chunks[0].step.tokens),
            "output": " ".join(map(str, tokens)),
            "keeps": keeps,
            "adds": " ".join(map(str, prompt[keeps:])),
            "context": len(prompt) + len(tokens),
            "stats": summarise([chunk.step for chunk in output.chunks], seconds).as_dict(),
        }


def llama_session(name: str, turns: list[Turn], target: str) -> list[Turn]:
    """Return the same turns by llama.cpp."""
    import torch

    from benchmarks.peers.llama import LlamaCpp, context_length
    from forerun.sampling.params import SamplingParams
    from forerun.zoo import ModelSource

    source = ModelSource.parse(target, "target")
    source.check()
    models: dict[str, Any] = {"target": str(source.gguf)}
    if "draft" in llama_mode(name):
        draft = source.own_draft()
        if draft is None:
            raise ValueError(f"{name} needs a draft, and {target!r} has none on this machine")
        models["draft"] = str(draft.gguf)
    models["length"] = context_length(max(turn["context"] for turn in turns) + LLAMA_SPARE)
    models["threads"] = torch.get_num_threads()
    peer = LlamaCpp(models, SamplingParams(), set())
    prompt = list(map(int, turns[0]["adds"].split()))
    peer.turn(name, prompt[:16], 16)  # the first output is not counted
    records: list[Turn] = []
    for number, turn in enumerate(turns, 1):
        prompt = prompt[: turn["keeps"]] + list(map(int, turn["adds"].split()))
        answer = peer.turn(name, prompt, turn["tokens"])
        records.append(
            {
                "function": turn["function"],
                "tokens": turn["tokens"],
                "context": turn["context"],
                "seconds": round(answer["seconds"], 4),
                "decoding_seconds": round(answer["seconds"] - answer["first"], 4),
                "decoded": turn["tokens"] - 1,
                "stats": {"target_forwards": answer["forwards"], "tested": 0, "accepted": 0},
            }
        )
        print(f"  turn {number}: {turn['tokens']} tokens in {answer['seconds']:.1f} s", flush=True)
    peer.process.kill()
    return records


def figures(turns: list[Turn]) -> dict[str, float]:
    """Return the figures of a session.

    They are of whole turns, and of decoding, from a turn's first tokens to its last.
    """

    def total(name: str) -> Any:
        return sum(turn[name] for turn in turns)

    def total_of_stats(name: str) -> int:
        return sum(turn["stats"][name] for turn in turns)

    tokens = total("tokens")
    seconds = total("seconds")
    tested = max(1, total_of_stats("tested"))
    return {
        "tokens": tokens,
        "seconds": round(seconds, 3),
        "tokens_per_s": round(tokens / seconds, 2),
        "decoding_tokens_per_s": round(total("decoded") / total("decoding_seconds"), 2),
        "tau": round(tokens / total_of_stats("target_forwards"), 3),
        "alpha": round(total_of_stats("accepted") / tested, 3),
    }


def page(results: dict[str, Any]) -> str:
    """Return the page of results."""
    by_method: dict[str, list[Session]] = {}
    for session in results["sessions"]:
        by_method.setdefault(session["method"], []).append(session)
    rounds = max(map(len, by_method.values()))
    lines = [*front(results), "", *method_table(by_method)]
    if any(map(is_llama, by_method)):
        lines += [
            "",
            "llama.cpp has the turns of `ar`: the same prompts, as many tokens, without the "
            "grammar of calls. It keeps what it has read.",
        ]
    if rounds > 1:
        lines += ["", f"The fastest of {rounds} rounds each."]
    lines += ["", "By turn, tokens/s:", "", *turn_table(by_method)]
    return "\n".join(lines) + "\n"


def front(results: dict[str, Any]) -> list[str]:
    """Return the title, where the sessions were measured, and what they are."""
    versions = results["versions"]
    turns = results["sessions"][0]["turns"]
    where = (
        f"{versions['gpu'] or versions['cpu']}, {versions['threads']} threads, "
        f"kernels {versions['kernels']}, torch {versions['torch']}, "
        f"transformers {versions['transformers']}, {versions['commit']}"
    )
    about = (
        f"{len(turns)} turns with tools on `{results['arguments']['target']}`, greedily, guard on, "
        f"until the text has {turns[-1].get('context', 0)} tokens: files are listed, "
        "read and written anew, tests are run. The function of each turn is given; the rest is the "
        "model's. All methods of forerun have the same session, token for token. Seconds are of "
        "whole turns, with what is read and the grammar of the call; decoding is from a turn's "
        "first tokens to its last."
    )
    command = ["```", results["command"], "```", ""]
    return ["# An agent's session", "", f"{results['date']}, {where}.", "", *command, about]


def method_table(by_method: dict[str, list[Session]]) -> list[str]:
    """Return the table of the fastest session of each method."""
    best = {}
    for name, sessions in by_method.items():
        rows = [session["figures"] for session in sessions]
        best[name] = max(rows, key=lambda row: row["tokens_per_s"])
    plain = best.get("ar", next(iter(best.values())))
    lines = [
        "| method | tokens/s | over `ar` | decoding, tokens/s | over `ar` | tau | alpha | tokens | "
        "seconds |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, row in best.items():
        speeds = [
            f"{row[rate]:.1f} | {row[rate] / plain[rate]:.2f}"
            for rate in ("tokens_per_s", "decoding_tokens_per_s")
        ]
        lines.append(
            f"| `{name}` | {' | '.join(speeds)} | {row['tau']:.2f} | {row['alpha']:.2f} | "
            f"{row['tokens']} | {row['seconds']:.1f} |"
        )
    return lines


def turn_table(by_method: dict[str, list[Session]]) -> list[str]:
    """Return the table of all turns, of each method's first session."""
    sessions = [some[0]["turns"] for some in by_method.values()]
    names = " | ".join(f"`{name}`" for name in by_method)
    lines = [
        f"| turn | function | text so far | tokens | {names} |",
        "|---|---|---:|---:|" + "---:|" * len(by_method),
    ]
    for number, turns in enumerate(zip(*sessions, strict=True), 1):
        first = turns[0]
        speeds = " | ".join(f"{turn['tokens'] / turn['seconds']:.1f}" for turn in turns)
        about = f"{first['function'] or 'words'} | {first.get('context', '')} | {first['tokens']}"
        lines.append(f"| {number} | {about} | {speeds} |")
    return lines


def run_session(name: str, options: argparse.Namespace, sessions: list[Session]) -> list[Turn]:
    """Run one session with models that are loaded for it; `sessions` are those before it."""
    if is_llama(name):
        plain = next(session for session in sessions if session["method"] == "ar")
        return llama_session(name, plain["turns"], options.target)
    decoder = forerun.load(options.target, method=name)
    decoder.chat([{"role": "user", "content": "Write a haiku."}], max_new_tokens=24)
    return Agent(decoder, options.session).run()


def run_missing(results: dict[str, Any], options: argparse.Namespace) -> None:
    """Run the sessions that the results lack, and write each when it is done."""
    names = options.methods.split(",")
    given = {name: getattr(options, name) for name in OPTIONS}
    sessions = results["sessions"]
    for number in range(options.rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:  # each round begins with another method
            if any((one["method"], one["round"]) == (name, number) for one in sessions):
                continue
            print(f"round {number + 1}, {name}", flush=True)
            turns = run_session(name, options, sessions)
            session = {"method": name, "round": number, "figures": figures(turns), "turns": turns}
            sessions.append(session)
            results |= provenance(given) | {"command": command_of(options)}
            options.out.parent.mkdir(parents=True, exist_ok=True)
            write_text(options.out, json.dumps(results, indent=1) + "\n")
            print(f"  {session['figures']}", flush=True)
            gc.collect()


def command_of(options: argparse.Namespace) -> str:
    words = ["python", "-m", "benchmarks.serving.agent", "--target", options.target]
    words += ["--methods", options.methods, "--session", options.session]
    words += ["--rounds", str(options.rounds), "--out", "RESULTS.json"]
    return shlex.join(words)


def are_equal(sessions: list[Session]) -> bool:
    """Return whether our sessions are the same, token for token."""
    outputs = set()
    for session in sessions:
        if not is_llama(session["method"]):
            outputs.add(tuple(turn["output"] for turn in session["turns"]))
    return len(outputs) <= 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="qwen-coder")
    parser.add_argument("--methods", default=DEFAULT_METHODS)
    parser.add_argument("--session", choices=sorted(MOST_TOKENS), default="short")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--page", type=Path)
    options = parser.parse_args()
    if options.threads is not None:
        import torch

        torch.set_num_threads(options.threads)
    results: dict[str, Any] = {"sessions": []}
    if options.out.is_file():
        results = json.loads(options.out.read_text(encoding="utf-8"))
        if results["arguments"] != {name: getattr(options, name) for name in OPTIONS}:
            parser.error(f"{options.out} was made with other arguments: give another --out")
    names = options.methods.split(",")
    if any(map(is_llama, names)) and names[0] != "ar":
        parser.error("--methods: llama.cpp has the turns of `ar`, so that must come first")
    run_missing(results, options)
    if not are_equal(results["sessions"]):
        print("the sessions are not the same, token for token")
        return 1
    if options.page is not None:
        write_text(options.page, page(results))
        print(options.page)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
