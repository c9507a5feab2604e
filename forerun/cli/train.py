"""`forerun train`: trains a draft, a pre-verifier or a head for any target."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from forerun.cli.common import help_text, quiet
from forerun.cli.options import DeviceOption, ThreadsOption, TrustOption, grouped
from forerun.zoo import EMBEDDED, ModelSource

if TYPE_CHECKING:
    from forerun.train.run import Run

app = typer.Typer(help="Train a draft, a pre-verifier or a head.", no_args_is_help=True)
OutOption = Annotated[
    Path, typer.Option(help="Output folder. A stopped training with this folder continues.")
]
RateOption = Annotated[float, typer.Option(min=0, help="Learning rate.")]
PromptOption = Annotated[
    int, typer.Option(min=2, help="Tokens of text at the beginning of a window.")
]
STDLIB_NAME = "stdlib"  # stands for Python's standard library among the texts


@dataclass(frozen=True)
class TrainOptions:
    """What all trainings need."""

    out: OutOption
    data: Annotated[
        list[str] | None,
        typer.Option(
            help=(
                "Texts from which prompts are cut: files or folders (.txt .md .py .jsonl), or "
                f"'{STDLIB_NAME}' for Python's standard library. May be repeated."
            )
        ),
    ] = None
    chats: Annotated[
        Path | None, typer.Option(help="Folder of conversations, used instead of --data.")
    ] = None
    target: Annotated[
        str, typer.Option(help="Hub id, folder or GGUF file of the target model.")
    ] = EMBEDDED
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 2000
    work: Annotated[
        Path | None,
        typer.Option(
            help=(
                "Folder of intermediate results, which several trainings may share. Default: "
                "'work' in the output folder."
            )
        ),
    ] = None
    seed: Annotated[int, typer.Option(min=0, help="Seed of the training.")] = 0
    device: DeviceOption = None
    trust_remote_code: TrustOption = False
    threads: ThreadsOption = None

    def run(self, draft: str | None = None) -> Run:
        """Return the run of these options.

        Raises ValueError for texts and models that do not exist, and under torchrun.
        """
        if os.environ.get("WORLD_SIZE", "1") != "1":
            raise ValueError("a training is one process: start it without torchrun or accelerate")
        for text in self.data or []:
            if text != STDLIB_NAME and not Path(text).exists():
                raise ValueError(f"no such file or folder: {text}")
        ModelSource.parse(self.target, "target").check()
        if draft is not None:
            ModelSource.parse(draft, "draft").check()
        quiet(self.threads)
        from forerun.train.run import Run

        return Run(
            target=self.target,
            out=self.out,
            data=self.data or [],
            chats=self.chats,
            work=self.work,
            device=self.device,
            trust_remote_code=self.trust_remote_code,
            say=say,
        )


@dataclass(frozen=True)
class DraftOptions:
    """The form of a draft, and what it is trained on."""

    init: Annotated[
        str | None,
        typer.Option(help="Model to continue training from. Default: a new Llama."),
    ] = None
    layers: Annotated[int, typer.Option(min=1, help="Layers of a new draft.")] = 2
    width: Annotated[int, typer.Option(min=64, help="Width of a new draft, a multiple of 64.")] = (
        192
    )
    hot: Annotated[
        float,
        typer.Option(
            help="Share of the vocabulary that the draft proposes, besides the tokens of the text."
        ),
    ] = 1.0
    batch: Annotated[
        int,
        typer.Option(min=2, help="Windows per step, about half of them the target's own output."),
    ] = 16
    length: Annotated[int, typer.Option(min=16, help="Tokens of a window.")] = 512
    sequences: Annotated[
        int, typer.Option(min=2, help="Windows of the target's own output to generate.")
    ] = 3072
    lr: RateOption = 3e-3


@dataclass(frozen=True)
class PreVerifierOptions:
    """The form of a pre-verifier, and what it is trained on."""

    draft: Annotated[
        str | None,
        typer.Option(
            help="Hub id, folder or GGUF file of the draft. Default: the target's own draft."
        ),
    ] = None
    width: Annotated[int, typer.Option(min=8, help="Width of the layer, a multiple of 4.")] = 32
    sequences: Annotated[
        int,
        typer.Option(min=4, help="Windows of the target's own output, or the most conversations."),
    ] = 2048
    prompt: PromptOption = 128
    output: Annotated[
        int, typer.Option(min=24, help="Tokens of output in a window, after the text.")
    ] = 148
    anchors: Annotated[
        int, typer.Option(min=2, help="Places in each window or answer from which a draft starts.")
    ] = 48
    lr: RateOption = 2e-3


@dataclass(frozen=True)
class HeadOptions:
    """The form of a head, and what it is trained on."""

    kind: Annotated[
        str, typer.Option(help="lyanna, or eagle to compare it with an EAGLE-like head.")
    ] = "lyanna"
    layers: Annotated[int, typer.Option(min=1, help="Decoder layers of the head.")] = 1
    rank: Annotated[
        int, typer.Option(min=0, help="Rank of the token information; 0 trains a head without it.")
    ] = 64
    hot: Annotated[
        float | None,
        typer.Option(
            help=(
                "Share of the vocabulary that the head drafts from. Default: 1/4, but at most "
                "16,384 tokens."
            )
        ),
    ] = None
    inner: Annotated[
        int | None,
        typer.Option(
            help=(
                "Neurons of the head's MLP. Default: as many as in the target's MLP, but at most "
                "so many that the head takes 24 MB in 6 bits."
            )
        ),
    ] = None
    copied: Annotated[bool, typer.Option(help="Start with a copy of the target's last layer.")] = (
        True
    )
    linear: Annotated[
        int,
        typer.Option(
            min=0, help="Steps before --steps that train a copied head without its layers."
        ),
    ] = 150
    sequences: Annotated[
        int, typer.Option(min=4, help="Windows of the target's own output to generate.")
    ] = 2048
    prompt: PromptOption = 64
    output: Annotated[
        int, typer.Option(min=8, help="Tokens of output in a window, after the text.")
    ] = 192
    batch: Annotated[int, typer.Option(min=1, help="Windows per step.")] = 8
    lr: RateOption = 6e-3
    unroll: Annotated[
        int, typer.Option(min=1, help="How many tokens of a draft the head is trained to predict.")
    ] = 4
    start: Annotated[
        Path | None,
        typer.Option(help="Folder of a trained head of the same form, to continue training from."),
    ] = None


def say(line: str) -> None:
    """Print a line on the progress of a training on stdout."""
    print(line, flush=True)


@grouped
def draft(training: TrainOptions, options: DraftOptions) -> None:
    """Distil a draft for any target from the target's own output."""
    if options.width % 64:
        raise ValueError(f"--width must be a multiple of 64, not {options.width}")
    run = training.run(options.init)
    from forerun.train.draft import DraftRecipe, train_draft

    recipe = DraftRecipe(
        sequences=options.sequences,
        length=options.length,
        layers=options.layers,
        width=options.width,
        hot=options.hot,
        steps=training.steps,
        batch=options.batch,
        lr=options.lr,
        seed=training.seed,
    )
    train_draft(run, recipe, options.init)


@grouped
def pre_verifier(training: TrainOptions, options: PreVerifierOptions) -> None:
    """Train the layer that decides where a draft ends.

    It is best trained on text that neither the target nor the draft was trained on.
    """
    draft = options.draft
    if draft is None:
        source = ModelSource.parse(training.target, "target").own_draft()
        if source is None:
            raise ValueError("the target has no draft of its own: give one with --draft")
        draft = source.name
    if options.width % 4:
        raise ValueError(f"--width must be a multiple of 4, not {options.width}")
    run = training.run(draft)
    from forerun.train.pre_verifier import Recipe, train_pre_verifier

    recipe = Recipe(
        sequences=options.sequences,
        prompt=options.prompt,
        output=options.output,
        anchors=options.anchors,
        steps=training.steps,
        lr=options.lr,
        width=options.width,
        seed=training.seed,
    )
    train_pre_verifier(run, draft, recipe)


@grouped
def lyanna(training: TrainOptions, options: HeadOptions) -> None:
    """Train a head that drafts from the target's hidden states."""
    run = training.run()
    from forerun.train.head import HeadRecipe, train_head

    recipe = HeadRecipe(
        sequences=options.sequences,
        prompt=options.prompt,
        output=options.output,
        steps=training.steps,
        batch=options.batch,
        lr=options.lr,
        unroll=options.unroll,
        seed=training.seed,
        kind=options.kind,
        layers=options.layers,
        rank=options.rank,
        hot=options.hot,
        inner=options.inner,
        copied=options.copied,
        linear=options.linear,
    )
    train_head(run, recipe, options.start)


TRAININGS: dict[str, Callable[..., None]] = {
    "draft": draft,
    "pre-verifier": pre_verifier,
    "lyanna": lyanna,
}
for name, training_command in TRAININGS.items():
    app.command(name, help=help_text(training_command))(training_command)
