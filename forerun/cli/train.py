"""`forerun train`: the embedded pair, or a draft, a pre-verifier or a head for any target."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated

import typer

from forerun.cli.common import DeviceOption, ThreadsOption, TrustOption, WeightsOption, quiet
from forerun.zoo import EMBEDDED, own_draft, resolve

app = typer.Typer(help="Train the embedded pair, or a draft, pre-verifier or head.", no_args_is_help=True)
ChatsOption = Annotated[
    Path | None, typer.Option(help="Folder that `forerun train chat-data` made, instead of --data.")
]


def say(line: str) -> None:
    print(line, flush=True)


def _check_data(data: list[str], *names: str) -> None:
    """Raises ValueError for a source of text that is neither one of these names nor a file or folder."""
    for source in data:
        if source not in names and not Path(source).exists():
            raise ValueError(f"no such file or folder: {source}")


@app.command("pair")
def pair(
    out: Annotated[Path, typer.Option(help="Working folder; a run that was stopped goes on from it.")] = Path(
        "runs/pair"
    ),
    corpus: Annotated[
        Path | None, typer.Option(help="Learn from this tree of .py files, not the standard library.")
    ] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Change the recipe, FIELD=N; repeatable.")] = None,
    no_compile: Annotated[bool, typer.Option("--no-compile", help="Train without torch.compile.")] = False,
    threads: ThreadsOption = None,
) -> None:
    """Reproduce the embedded pair from this machine's standard library: tokenizer, target, draft, comparison."""
    from forerun.train.recipe import PairRecipe

    recipe = PairRecipe()
    known = {field.name: getattr(recipe, field.name) for field in fields(recipe)}
    for setting in set_ or []:
        name, _, value = setting.partition("=")
        if name not in known:
            raise ValueError(f"the recipe has no {name!r}; it has {', '.join(known)}")
        least = 0 if name in ("seed", "grown_steps") else 1
        if not value.isdigit() or int(value) < least:
            raise ValueError(f"--set {name} takes an integer of at least {least}, not {value!r}")
        recipe = replace(recipe, **{name: int(value)})
    if corpus is not None and not corpus.is_dir():
        raise ValueError(f"no such folder: {corpus}")
    if recipe.batch < 2:
        raise ValueError("--set batch must be at least 2")
    quiet(threads)
    from forerun.train.pair import train_pair

    train_pair(out, recipe, root=corpus, compiled=not no_compile, say=say)
    say(f"the pair is in {out / 'pair'}: forerun generate --target {out / 'pair/target'} --draft {out / 'pair/draft'}")


@app.command("draft")
def draft(
    out: Annotated[Path, typer.Option(help="Where the draft goes; a run that was stopped goes on from it.")],
    data: Annotated[
        list[str] | None, typer.Option(help="Text: files or folders (.txt .md .py .jsonl), or 'stdlib'; repeatable.")
    ] = None,
    chats: ChatsOption = None,
    target: Annotated[str, typer.Option(help="Hub id or folder of the target.")] = EMBEDDED,
    init: Annotated[str | None, typer.Option(help="Start from this model instead of a new Llama.")] = None,
    layers: Annotated[int, typer.Option(min=1, help="Layers of a new draft.")] = 2,
    width: Annotated[int, typer.Option(min=64, help="Width of a new draft, a multiple of 64.")] = 192,
    hot: Annotated[float, typer.Option(help="Share of the vocabulary that it proposes, beside the text's own.")] = 1.0,
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 2000,
    batch: Annotated[int, typer.Option(min=2, help="Windows a step, half of them the target's own output.")] = 16,
    length: Annotated[int, typer.Option(min=16, help="Tokens a window.")] = 512,
    sequences: Annotated[int, typer.Option(min=2, help="Windows of the target's own output to make.")] = 3072,
    lr: Annotated[float, typer.Option(min=0, help="Learning rate.")] = 3e-3,
    seed: Annotated[int, typer.Option(min=0, help="Of the training.")] = 0,
    device: DeviceOption = None,
    no_compile: Annotated[bool, typer.Option("--no-compile", help="Train without torch.compile.")] = False,
    trust_remote_code: TrustOption = False,
    threads: ThreadsOption = None,
) -> None:
    """Distil a draft for any target on the target's own output."""
    if width % 64:
        raise ValueError(f"--width must be a multiple of 64, not {width}")
    data = data or []
    _check_data(data, "stdlib")
    resolve(target, "target")
    if init is not None:
        resolve(init, "draft")
    quiet(threads)
    from forerun.train.draft import train_draft
    from forerun.train.loop import TrainConfig

    config = TrainConfig(steps=steps, batch=batch, length=length, lr=lr, seed=seed, compile=not no_compile)
    train_draft(
        target,
        data,
        out,
        config,
        chats=chats,
        init=init,
        layers=layers,
        width=width,
        sequences=sequences,
        hot=hot,
        device=device,
        trust_remote_code=trust_remote_code,
        say=say,
    )


@app.command("chat-data")
def chat_data(
    out: Annotated[Path, typer.Option(help="Where the conversations go; a run that was stopped goes on from it.")],
    target: Annotated[str, typer.Option(help="Hub id, folder or GGUF file of a chat model.")] = "smollm2",
    conversations: Annotated[int, typer.Option(min=20, help="How many.")] = 14_000,
    code: Annotated[int, typer.Option(min=0, max=100, help="Percent about the standard library's functions.")] = 25,
    answer: Annotated[int, typer.Option(min=8, help="Most tokens of an answer.")] = 256,
    shard: Annotated[int, typer.Option(min=2, help="Conversations of a file, between which a run can stop.")] = 512,
    seed: Annotated[int, typer.Option(min=0, help="Of sampling.")] = 0,
    weights: WeightsOption = None,
    device: DeviceOption = None,
    threads: ThreadsOption = None,
) -> None:
    """Have a chat model ask and answer questions, as text to train on."""
    resolve(target, "target")
    quiet(threads)
    from forerun.train.chat_data import ChatRecipe, make_chats

    recipe = ChatRecipe(conversations, code, answer=answer, shard=shard, seed=seed)
    make_chats(target, out, recipe, weights=weights, device=device, say=say)
    say(f"the conversations are in {out}: forerun train draft --target {target} --chats {out} --out DRAFT")


@app.command("pre-verifier")
def pre_verifier(
    out: Annotated[Path, typer.Option(help="Where the layer goes; a run that was stopped goes on from it.")],
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="Text for prompts, best such as neither model was trained on: files or folders (.txt .md .py "
            ".jsonl), 'stdlib', or 'stdlib-spare' (files the embedded pair has not seen); repeatable."
        ),
    ] = None,
    chats: ChatsOption = None,
    target: Annotated[str, typer.Option(help="Hub id or folder of the target.")] = EMBEDDED,
    draft: Annotated[str | None, typer.Option(help="Hub id or folder of the draft.")] = None,
    kind: Annotated[str, typer.Option(help="pacer, or specdec++ for that method's head.")] = "pacer",
    inputs: Annotated[
        str | None,
        typer.Option(
            help="What the layer sees, separated by commas: confidence, echoes and history by default; also hidden, "
            "token, target, and entropy and top of the target's law behind the last verified token."
        ),
    ] = None,
    width: Annotated[int, typer.Option(min=8, help="Width of the layer, a multiple of 4.")] = 32,
    layers: Annotated[int, typer.Option(min=0, help="Transformer blocks; 0 for a perceptron.")] = 0,
    sequences: Annotated[int, typer.Option(min=2, help="Windows of the target's own output, or conversations.")] = 2048,
    prompt: Annotated[int, typer.Option(min=2, help="Tokens of text a window begins with.")] = 128,
    output: Annotated[int, typer.Option(min=24, help="Tokens of output a window goes on with.")] = 148,
    anchors: Annotated[int, typer.Option(min=2, help="Drafts that leave each window or answer.")] = 48,
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 2000,
    lr: Annotated[float, typer.Option(min=0, help="Learning rate.")] = 2e-3,
    weight: Annotated[float | None, typer.Option(min=0, help="Weight of rejections in the loss.")] = None,
    work: Annotated[Path | None, typer.Option(help="Folder of the gathered drafts, to train several layers.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the training.")] = 0,
    device: DeviceOption = None,
    trust_remote_code: TrustOption = False,
    threads: ThreadsOption = None,
) -> None:
    """Train the layer that decides where a draft ends."""
    draft = draft if draft is not None else own_draft(target)
    if draft is None:
        raise ValueError("give a draft: --draft")
    if kind not in ("pacer", "specdec++"):
        raise ValueError(f"--kind must be pacer or specdec++, not {kind!r}")
    if width % 4:
        raise ValueError(f"--width must be a multiple of 4, not {width}")
    data = data or []
    _check_data(data, "stdlib", "stdlib-spare")
    resolve(target, "target")
    resolve(draft, "draft")
    quiet(threads)
    from forerun.nn.pre_verifier import INPUTS
    from forerun.train.pre_verifier import Recipe, train_pre_verifier

    layer: dict[str, object] = {"width": width, "layers": layers}
    if kind == "specdec++":  # a perceptron over the draft's hidden state, as in arXiv 2405.19715
        layer |= {"layers": 0, "kind": "acceptance", "inputs": ["hidden"]}
    if inputs is not None:
        layer["inputs"] = inputs.split(",")
        for name in inputs.split(","):
            if name not in INPUTS:
                raise ValueError(f"--inputs knows {', '.join(INPUTS)}, not {name!r}")
    recipe = Recipe(
        sequences=sequences,
        prompt=prompt,
        output=output,
        anchors=anchors,
        steps=steps,
        lr=lr,
        weight=weight if weight is not None else 6.0 if kind == "specdec++" else 1.0,
        seed=seed,
    )
    train_pre_verifier(
        target,
        draft,
        data,
        out,
        recipe,
        layer,
        chats=chats,
        work=work,
        device=device,
        trust_remote_code=trust_remote_code,
        say=say,
    )


@app.command("lyanna")
def lyanna(
    out: Annotated[Path, typer.Option(help="Where the head goes; a run that was stopped goes on from it.")],
    data: Annotated[
        list[str] | None,
        typer.Option(help="Text for prompts: files or folders (.txt .md .py .jsonl), or 'stdlib'; repeatable."),
    ] = None,
    chats: ChatsOption = None,
    target: Annotated[str, typer.Option(help="Hub id or folder of the target.")] = EMBEDDED,
    kind: Annotated[str, typer.Option(help="lyanna, or eagle to compare with.")] = "lyanna",
    layers: Annotated[int, typer.Option(min=1, help="Decoder layers of the head.")] = 1,
    rank: Annotated[int, typer.Option(min=0, help="Rank of the token information; 0 for a head without it.")] = 64,
    hot: Annotated[float, typer.Option(help="Share of the vocabulary that it drafts from.")] = 0.25,
    known: Annotated[
        bool, typer.Option(help="Whether lyanna's layers see the tokens behind the target's features.")
    ] = True,
    feature: Annotated[
        str,
        typer.Option(help="What the head takes: head, the LM head's input; below, the states below the last layer."),
    ] = "head",
    fusion: Annotated[
        str, typer.Option(help="States that lyanna's fusion layer takes: every; first, the target's features alone.")
    ] = "every",
    sequences: Annotated[int, typer.Option(min=4, help="Windows of the target's own output.")] = 2048,
    prompt: Annotated[int, typer.Option(min=2, help="Tokens of text a window begins with.")] = 64,
    output: Annotated[int, typer.Option(min=8, help="Tokens of output a window goes on with.")] = 192,
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 2000,
    batch: Annotated[int, typer.Option(min=1, help="Windows a step.")] = 8,
    lr: Annotated[float, typer.Option(min=0, help="Learning rate.")] = 6e-3,
    unroll: Annotated[int, typer.Option(min=1, help="Steps of a draft that are trained.")] = 4,
    loss: Annotated[str, typer.Option(help="law: cross-entropy end to end; regression: EAGLE's form.")] = "law",
    start: Annotated[Path | None, typer.Option(help="A trained head of the same form to go on from.")] = None,
    work: Annotated[Path | None, typer.Option(help="Folder of the target's own output, to train several.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the training.")] = 0,
    device: DeviceOption = None,
    trust_remote_code: TrustOption = False,
    threads: ThreadsOption = None,
) -> None:
    """Train a head that drafts from the target's hidden states."""
    data = data or []
    _check_data(data, "stdlib")
    resolve(target, "target")
    quiet(threads)
    from forerun.train.heads import HeadRecipe, train_head

    train_head(
        target,
        data,
        out,
        HeadRecipe(sequences, prompt, output, steps, batch, lr, unroll, loss, seed=seed),
        kind,
        layers=layers,
        rank=rank,
        hot=hot,
        known=known,
        feature=feature,
        fusion=fusion,
        chats=chats,
        start=start,
        work=work,
        device=device,
        trust_remote_code=trust_remote_code,
        say=say,
    )
