"""`isotype chat RUN`: a conversation with a run. `isotype sample RUN`: its answers to prompts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import UsageError

if TYPE_CHECKING:
    from ..inference.loaded import Conversation


def chat(
    run: Annotated[Path, typer.Argument(help="A run's folder, finished or not; an adapter's or a model's too.")],
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Longest answer in tokens.")] = 256,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0, help="0 is greedy.")] = 0.7,
    top_p: Annotated[
        float, typer.Option("--top-p", min=0.0, max=1.0, help="Sample from the most likely tokens up to this share of probability (top-p).")
    ] = 0.9,
    image: Annotated[list[str] | None, typer.Option("--image", help="A picture that the first question is about; may be repeated.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print each answer as one line of JSON; nothing is streamed.")] = False,
) -> None:
    """Talk with a run, under its own precision and template.

    /reset forgets what was said, /quit or Ctrl-D ends; Ctrl-C stops an answer.

    Examples:

        isotype chat runs/qwen

        echo "What does os.path.join do?" | isotype chat quickstart/tune --temperature 0

        isotype chat runs/gemma --image photo.jpg
    """
    from ..runs.folder import require_run, run_and_result, without_run

    if without_run(run) is None:
        require_run(run_and_result(run)[0])  # checked first, since loading takes seconds
    from ..training.quiet import quiet_libraries

    quiet_libraries()
    from ..inference.loaded import Conversation, load_run

    loaded = load_run(run)
    conversation = Conversation(loaded, max_new_tokens=tokens, temperature=temperature, top_p=top_p, stream=not json_output)
    conversation.show(image or [])
    prompt = "> " if sys.stdin.isatty() and not json_output else ""
    if prompt:
        print(f"{run} ({loaded.taken}). /reset forgets, /quit ends, Ctrl-C stops an answer.")
    while True:
        try:
            said = input(prompt).strip()
        except (EOFError, KeyboardInterrupt):
            if prompt:
                print()
            return
        if said in ("/quit", "/exit"):
            return
        if said in ("/reset", "/clear"):
            conversation.clear()
        elif said.startswith("/") and said[1:].isalpha():
            print(f"{said}: no such command: /reset, /quit", file=sys.stderr)
        elif said:
            _answer(conversation, said, json_output=json_output)


def _answer(conversation: Conversation, said: str, *, json_output: bool) -> None:
    try:
        answer = conversation.say(said)
    except KeyboardInterrupt:
        print("\n(stopped; this question is not part of the conversation)", file=sys.stderr)
        return
    if json_output:
        print(json.dumps({"prompt": said, "answer": answer}), flush=True)


def sample(
    context: typer.Context,
    run: Annotated[Path, typer.Argument(help="A run's folder, finished or not; an adapter's (RUN/adapters/step_N) or a model's too.")],
    prompt: Annotated[list[str] | None, typer.Argument(metavar="[PROMPT ...]", help="Prompts; the run's own by default.")] = None,
    prompts: Annotated[Path | None, typer.Option("--prompts", help="A file with one prompt per line.")] = None,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Longest answer in tokens.")] = 128,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0, help="0 is greedy.")] = 0.0,
    top_p: Annotated[
        float,
        typer.Option(
            "--top-p",
            min=0.0,
            max=1.0,
            help="With a temperature: sample from the most likely tokens up to this share of probability (top-p).",
        ),
    ] = 1.0,
    control: Annotated[Path | None, typer.Option("--control", help="The picture that the prompts edit, of a model that edits.")] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of the draw.")] = 0,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Answer prompts with a run, under the run's own precision. A diffusion run draws a picture for each, into RUN/drawn.

    Examples:

        isotype sample runs/qwen "What is a bf16?"

        isotype sample runs/qwen --prompts questions.txt

        isotype sample runs/qwen --prompts questions.txt --temperature 0.7 --top-p 0.9 --seed 3 --json
    """
    texts: list[str] = [text for text in prompt or [] if text.strip()]
    if prompt and len(texts) < len(prompt):
        raise UsageError("an empty prompt: give it some text, or none for the run's own prompts")
    if prompts is not None:
        from ..data.read import existing_file, read_text

        texts += [line for line in read_text(existing_file(str(prompts)), str(prompts)).split("\n") if line.strip()]
    from ..config.kind import DIFFUSION
    from ..runs.folder import kind_of_run

    if kind_of_run(run) == DIFFUSION:
        _draw(run, texts, context=context, seed=seed, control=control, json_output=json_output)
        return
    if control is not None:
        raise UsageError(f"--control has no effect: {run} is no diffusion run")
    from ..training.quiet import quiet_libraries
    from ..wording import printable

    quiet_libraries()
    import torch

    from ..data.load import load_data
    from ..data.prompts import prompts_from
    from ..inference.loaded import load_run
    from ..model.processor import pictures_of
    from ..runs.folder import without_run
    from ..tasks.language.sample import sample as answer

    loaded = load_run(run)
    own: list[Any] = texts or list(loaded.config.run.samples)
    alone = without_run(run) is not None
    # without a run that records its kind of rows, a prompt is a user's message in a chat
    template = loaded.tokenizer.chat_template if alone or _chats(run) else None
    if not own and alone:
        raise UsageError(f"{run}: not the folder of a run, so it has no prompts of its own", fix=f'isotype sample {run} "a question"')
    pictures = None
    if own:
        asked = prompts_from(own, loaded.tokenizer, chat_template=template)
    else:
        pictures = pictures_of(loaded.config.model, loaded.config.data, loaded.tokenizer)
        asked = list(load_data(loaded.config.data, loaded.tokenizer, seed=loaded.config.train.seed, pictures=pictures).prompts)
    torch.manual_seed(seed)
    answers = answer(
        loaded.model, loaded.tokenizer, asked, max_new_tokens=tokens, device=loaded.device, temperature=temperature, top_p=top_p,
        pictures=pictures,
    )  # fmt: skip
    if json_output:
        print(json.dumps({"run": str(run), "taken": loaded.taken, "samples": [a.as_json() for a in answers]}))
        return
    print(f"{run} ({loaded.taken})")
    for one in answers:
        print(f"\n> {one.prompt}\n{printable(one.answer) or '(nothing)'}")


def _draw(run: Path, texts: list[str], *, context: typer.Context, seed: int, control: Path | None, json_output: bool) -> None:
    """Pictures as files in RUN/drawn, numbered on from those that are there."""
    if control is not None and not texts:
        raise UsageError("--control has no effect without a prompt: the run's own prompts name their pictures")
    for option in ("tokens", "temperature", "top_p"):
        source = context.get_parameter_source(option)
        if source is not None and source.name != "DEFAULT":  # compared by name: typer has its own copy of click's enum
            raise UsageError(f"--{option.replace('_', '-')} has no effect: {run} is a diffusion run")
    from ..inference.diffusion import draw_with
    from ..runs.folder import run_and_result
    from ..training.quiet import quiet_libraries

    quiet_libraries()
    taken, pictures = draw_with(run, texts, seed=seed, control=control)
    folder = run_and_result(run)[0] / "drawn"
    folder.mkdir(exist_ok=True)
    first = 1 + max((int(p.stem) for p in folder.glob("*.png") if p.stem.isdecimal()), default=0)
    made: list[dict[str, str]] = []
    for number, picture in enumerate(pictures, start=first):
        file = folder / f"{number}.png"
        file.write_bytes(picture.png)
        made.append({"prompt": picture.prompt, "file": str(file)})
    if json_output:
        print(json.dumps({"run": str(run), "taken": taken, "samples": made}))
        return
    print(f"{run} ({taken})")
    for one in made:
        print(f"\n> {one['prompt']}\n{one['file']}")


def _chats(run: Path) -> bool:
    """Whether the run's rows were chats. A prompt is then a user's message in a chat."""
    from ..report.record import read_run
    from ..runs.folder import run_and_result

    return bool(read_run(run_and_result(run)[0]).data.get("template"))
