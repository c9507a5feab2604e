"""`forerun train`: a draft, a pre-verifier or a head for any target, and conversations to train on."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from forerun.cli.common import quiet
from forerun.cli.options import DeviceOption, ThreadsOption, TrustOption, grouped
from forerun.zoo import EMBEDDED, locate, own_draft

app = typer.Typer(help="Train a draft, pre-verifier or head.", no_args_is_help=True)
OutOption = Annotated[Path, typer.Option(help="Output folder; a stopped run continues from it.")]
RateOption = Annotated[float, typer.Option(min=0, help="Learning rate.")]
PromptOption = Annotated[int, typer.Option(min=2, help="Tokens of text a window begins with.")]


@dataclass(frozen=True)
class TrainOptions:
    """What all trainings need."""

    out: OutOption
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="Text for prompts: files or folders (.txt .md .py .jsonl), or 'stdlib'; repeatable."
        ),
    ] = None
    chats: Annotated[
        Path | None, typer.Option(help="Folder of conversations, instead of --data.")
    ] = None
    target: Annotated[str, typer.Option(help="Hub id or folder of the target.")] = EMBEDDED
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 2000
    work: Annotated[Path | None, typer.Option(help="Folder that several trainings share.")] = None
    seed: Annotated[int, typer.Option(min=0, help="Seed of the training.")] = 0
    device: DeviceOption = None
    trust_remote_code: TrustOption = False
    threads: ThreadsOption = None

    def run(self, draft: str | None = None) -> Any:
        """Return the run of these options. Raises ValueError for sources and models that do not exist, and under
        torchrun."""
        if os.environ.get("WORLD_SIZE", "1") != "1":
            raise ValueError("a training is one process: start it without torchrun or accelerate")
        for source in self.data or []:
            if source != "stdlib" and not Path(source).exists():
                raise ValueError(f"no such file or folder: {source}")
        locate(self.target, "target")
        if draft is not None:
            locate(draft, "draft")
        quiet(self.threads)
        from forerun.train.run import Run

        return Run(
            self.target,
            self.out,
            self.data or [],
            self.chats,
            self.work,
            self.device,
            self.trust_remote_code,
            say,
        )


def say(line: str) -> None:
    print(line, flush=True)


@app.command("draft")
@grouped
def draft(
    training: TrainOptions,
    init: Annotated[
        str | None, typer.Option(help="Start from this model instead of a new Llama.")
    ] = None,
    layers: Annotated[int, typer.Option(min=1, help="Layers of a new draft.")] = 2,
    width: Annotated[
        int, typer.Option(min=64, help="Width of a new draft, a multiple of 64.")
    ] = 192,
    hot: Annotated[
        float, typer.Option(help="Share of the vocabulary that it proposes, besides the text's.")
    ] = 1.0,
    batch: Annotated[
        int, typer.Option(min=2, help="Windows a step, about half of them the target's output.")
    ] = 16,
    length: Annotated[int, typer.Option(min=16, help="Tokens a window.")] = 512,
    sequences: Annotated[
        int, typer.Option(min=2, help="Windows of the target's own output to make.")
    ] = 3072,
    lr: RateOption = 3e-3,
) -> None:
    """Distil a draft for any target on the target's own output."""
    if width % 64:
        raise ValueError(f"--width must be a multiple of 64, not {width}")
    run = training.run(init)
    from forerun.train.draft import DraftRecipe, train_draft

    recipe = DraftRecipe(
        sequences, length, layers, width, hot, training.steps, batch, lr, training.seed
    )
    train_draft(run, recipe, init)


@app.command("pre-verifier")
@grouped
def pre_verifier(
    training: TrainOptions,
    draft: Annotated[str | None, typer.Option(help="Hub id or folder of the draft.")] = None,
    width: Annotated[int, typer.Option(min=8, help="Width of the layer, a multiple of 4.")] = 32,
    sequences: Annotated[
        int, typer.Option(min=4, help="Windows of own output, or conversations.")
    ] = 2048,
    prompt: PromptOption = 128,
    output: Annotated[
        int, typer.Option(min=24, help="Tokens of output a window goes on with.")
    ] = 148,
    anchors: Annotated[
        int, typer.Option(min=2, help="Drafts that leave each window or answer.")
    ] = 48,
    lr: RateOption = 2e-3,
) -> None:
    """Train the layer that decides where a draft ends; best on text that neither model was trained on."""
    draft = draft if draft is not None else own_draft(training.target)
    if draft is None:
        raise ValueError("give a draft: --draft")
    if width % 4:
        raise ValueError(f"--width must be a multiple of 4, not {width}")
    run = training.run(draft)
    from forerun.train.pre_verifier import Recipe, train_pre_verifier

    recipe = Recipe(
        sequences,
        prompt,
        output,
        anchors,
        steps=training.steps,
        lr=lr,
        width=width,
        seed=training.seed,
    )
    train_pre_verifier(run, draft, recipe)


@app.command("lyanna")
@grouped
def lyanna(
    training: TrainOptions,
    kind: Annotated[str, typer.Option(help="lyanna, or eagle to compare with.")] = "lyanna",
    layers: Annotated[int, typer.Option(min=1, help="Decoder layers of the head.")] = 1,
    rank: Annotated[
        int, typer.Option(min=0, help="Rank of the token information; 0 for a head without it.")
    ] = 64,
    hot: Annotated[
        float | None,
        typer.Option(
            help="Share of the vocabulary that it drafts from; default: 1/4, at most 16,384."
        ),
    ] = None,
    inner: Annotated[
        int | None,
        typer.Option(
            help="Neurons of its MLP; default: as the target, as many as fit 24 MB in 6 bits."
        ),
    ] = None,
    copied: Annotated[bool, typer.Option(help="Begin with the target's last layer.")] = True,
    linear: Annotated[
        int, typer.Option(min=0, help="Steps of a copied head before --steps, without its layer.")
    ] = 150,
    sequences: Annotated[
        int, typer.Option(min=4, help="Windows of the target's own output.")
    ] = 2048,
    prompt: PromptOption = 64,
    output: Annotated[
        int, typer.Option(min=8, help="Tokens of output a window goes on with.")
    ] = 192,
    batch: Annotated[int, typer.Option(min=1, help="Windows a step.")] = 8,
    lr: RateOption = 6e-3,
    unroll: Annotated[int, typer.Option(min=1, help="Steps of a draft that are trained.")] = 4,
    start: Annotated[
        Path | None, typer.Option(help="A trained head of the same form to go on from.")
    ] = None,
) -> None:
    """Train a head that drafts from the target's hidden states."""
    run = training.run()
    from forerun.train.head import HeadRecipe, train_head

    shape: dict[str, Any] = {
        "kind": kind,
        "layers": layers,
        "rank": rank,
        "hot": hot,
        "seed": training.seed,
    }
    shape |= {"inner": inner, "copied": copied, "linear": linear}
    train_head(
        run,
        HeadRecipe(sequences, prompt, output, training.steps, batch, lr, unroll, **shape),
        start,
    )
