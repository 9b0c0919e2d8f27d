"""Uses a trained run: `isotype chat RUN` starts a conversation, `isotype sample RUN` answers
prompts, and `isotype eval RUN FILE` measures the loss.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import UsageError
from ..wording import pluralise

if TYPE_CHECKING:
    from ..inference.loaded import Conversation


Run = Annotated[
    Path,
    typer.Argument(
        help="A run's folder, finished or not; an adapter's (RUN/adapters/step_N) or a model's too."
    ),
]
Tokens = Annotated[int, typer.Option("--tokens", min=1, help="Longest answer in tokens.")]
Temperature = Annotated[float, typer.Option("--temperature", min=0.0, help="0 is greedy.")]
TopP = Annotated[
    float,
    typer.Option(
        "--top-p",
        min=0.0,
        max=1.0,
        help="Sample from the most likely tokens up to this share of probability (top-p).",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object.")]


def chat(
    run: Run,
    tokens: Tokens = 256,
    temperature: Temperature = 0.7,
    top_p: TopP = 0.9,
    image: Annotated[
        list[str] | None,
        typer.Option(
            "--image", help="A picture that the first question is about; may be repeated."
        ),
    ] = None,
    json_output: Annotated[
        bool,
        typer.Option("--json", help="Print each answer as one line of JSON; nothing is streamed."),
    ] = False,
) -> None:
    """Chat with the model of a run, with the run's precision and chat template.

    /reset starts a new conversation, /quit or Ctrl-D ends the chat, and Ctrl-C stops an answer.

    Examples:

        isotype chat runs/qwen

        echo "What does os.path.join do?" | isotype chat quickstart/tune --temperature 0

        isotype chat runs/gemma --image photo.jpg
    """
    _require_run(run)
    from ..training.console import quiet_libraries

    quiet_libraries()
    from ..inference.loaded import Conversation, load_run

    loaded = load_run(run)
    conversation = Conversation(
        loaded, max_new_tokens=tokens, temperature=temperature, top_p=top_p, stream=not json_output
    )
    conversation.add_pictures(image or [])
    prompt = "> " if sys.stdin.isatty() and not json_output else ""
    if prompt:
        print(f"{run} ({loaded.weights_name}). /reset forgets, /quit ends, Ctrl-C stops an answer.")
    while True:
        try:
            line = input(prompt).strip()
        except (EOFError, KeyboardInterrupt):
            if prompt:
                print()
            return
        if line in ("/quit", "/exit"):
            return
        if line in ("/reset", "/clear"):
            conversation.clear()
        elif line.startswith("/") and line[1:].isalpha():
            print(f"{line}: no such command: /reset, /quit", file=sys.stderr)
        elif line:
            _answer(conversation, line, json_output=json_output)


def _answer(conversation: Conversation, question: str, *, json_output: bool) -> None:
    try:
        answer = conversation.answer(question)
    except KeyboardInterrupt:
        print("\n(stopped; this question is not part of the conversation)", file=sys.stderr)
        return
    if json_output:
        print(json.dumps({"prompt": question, "answer": answer}), flush=True)


def sample(
    context: typer.Context,
    run: Run,
    prompt: Annotated[
        list[str] | None,
        typer.Argument(metavar="[PROMPT ...]", help="Prompts; the run's own by default."),
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option("--prompts", help="A file with one prompt per line.")
    ] = None,
    tokens: Tokens = 128,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    control: Annotated[
        list[Path] | None,
        typer.Option(
            "--control",
            help="The picture that the prompts edit. Repeat it for several reference pictures.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of the draw.")] = 0,
    json_output: Json = False,
) -> None:
    """Answer prompts with the model of a run, in the run's precision. A diffusion run draws a
    picture for each prompt into RUN/drawn.

    Examples:

        isotype sample runs/qwen "What is a bf16?"

        isotype sample runs/qwen --prompts questions.txt

        isotype sample runs/qwen --prompts questions.txt --temperature 0.7 --seed 3 --json
    """
    texts: list[str] = [text for text in prompt or [] if text.strip()]
    if prompt and len(texts) < len(prompt):
        raise UsageError("an empty prompt: give it some text, or none for the run's own prompts")
    if prompts is not None:
        from ..data.read import read_text, require_file

        texts += [
            line
            for line in read_text(require_file(str(prompts)), str(prompts)).split("\n")
            if line.strip()
        ]
    from ..config.kind import DIFFUSION
    from ..runs.folder import detect_run_kind

    if detect_run_kind(run) == DIFFUSION:
        _draw(
            run, texts, context=context, seed=seed, controls=control or [], json_output=json_output
        )
        return
    if control:
        raise UsageError(f"--control has no effect: {run} is no diffusion run")
    from ..training.console import quiet_libraries
    from ..wording import remove_control_characters

    quiet_libraries()
    import torch

    from ..data.load import load_data
    from ..data.prompts import user_prompts
    from ..inference.loaded import load_run
    from ..model.processor import build_picture_reader
    from ..runs.folder import detect_model_folder
    from ..tasks.language.sample import sample as answer

    loaded = load_run(run)
    prompts_to_answer: list[Any] = texts or list(loaded.config.run.samples)
    is_without_run = detect_model_folder(run) is not None
    # for a folder that does not record the kind of training rows, a prompt is a user's message in a
    # chat
    template = loaded.tokenizer.chat_template if is_without_run or _is_chat_run(run) else None
    if not prompts_to_answer and is_without_run:
        raise UsageError(
            f"{run}: not the folder of a run, so it has no prompts of its own",
            fix=f'isotype sample {run} "a question"',
        )
    pictures = None
    if prompts_to_answer:
        rendered = user_prompts(prompts_to_answer, loaded.tokenizer, chat_template=template)
    else:
        pictures = build_picture_reader(loaded.config.model, loaded.config.data, loaded.tokenizer)
        rendered = list(
            load_data(
                loaded.config.data,
                loaded.tokenizer,
                seed=loaded.config.train.seed,
                pictures=pictures,
            ).prompts
        )
    torch.manual_seed(seed)
    answers = answer(
        loaded.model,
        loaded.tokenizer,
        rendered,
        max_new_tokens=tokens,
        device=loaded.device,
        temperature=temperature,
        top_p=top_p,
        pictures=pictures,
    )
    if json_output:
        print(
            json.dumps(
                {
                    "run": str(run),
                    "taken": loaded.weights_name,
                    "samples": [a.to_dict() for a in answers],
                }
            )
        )
        return
    print(f"{run} ({loaded.weights_name})")
    for reply in answers:
        print(f"\n> {reply.prompt}\n{remove_control_characters(reply.answer) or '(nothing)'}")


def _draw(
    run: Path,
    texts: list[str],
    *,
    context: typer.Context,
    seed: int,
    controls: list[Path],
    json_output: bool,
) -> None:
    """Draws pictures into RUN/drawn. The numbers of the files continue after the existing files."""
    if controls and not texts:
        raise UsageError(
            "--control has no effect without a prompt: the run's own prompts name their pictures"
        )
    for option in ("tokens", "temperature", "top_p"):
        source = context.get_parameter_source(option)
        # compared by name, because typer has a copy of click's enum
        if source is not None and source.name != "DEFAULT":
            raise UsageError(
                f"--{option.replace('_', '-')} has no effect: {run} is a diffusion run"
            )
    from ..inference.diffusion import draw_pictures
    from ..runs.folder import split_run_and_adapter
    from ..training.console import quiet_libraries

    quiet_libraries()
    weights_name, pictures = draw_pictures(run, texts, seed=seed, controls=controls)
    folder = split_run_and_adapter(run)[0] / "drawn"
    folder.mkdir(exist_ok=True)
    first = 1 + max((int(p.stem) for p in folder.iterdir() if p.stem.isdecimal()), default=0)
    drawn: list[dict[str, str]] = []
    for number, picture in enumerate(pictures, start=first):
        suffix, content = picture.file
        file = folder / f"{number}{suffix}"
        file.write_bytes(content)
        drawn.append({"prompt": picture.prompt, "file": str(file)})
    if json_output:
        print(json.dumps({"run": str(run), "taken": weights_name, "samples": drawn}))
        return
    print(f"{run} ({weights_name})")
    for picture_row in drawn:
        print(f"\n> {picture_row['prompt']}\n{picture_row['file']}")


def _is_chat_run(run: Path) -> bool:
    """Returns True if the run was trained on chats. A prompt is then a user's message in a chat."""
    from ..report.record import read_run
    from ..runs.folder import split_run_and_adapter

    return bool(read_run(split_run_and_adapter(run)[0]).data.get("template"))


def evaluate(
    run: Run,
    data: Annotated[
        str | None,
        typer.Argument(
            metavar="[FILE]",
            help=(
                "What data.train takes: a file, folder, glob, hf:NAME or stdlib. Without it the"
                " run's own evaluation rows."
            ),
            show_default=False,
        ),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(
            "--batch-size", min=1, help="Rows per forward pass; the result does not depend on it."
        ),
    ] = None,
    on_bad_row: Annotated[
        str | None,
        typer.Option(
            "--on-bad-row",
            metavar="error|skip",
            help="As data.on_bad_row; by default the run's own.",
            show_default=False,
        ),
    ] = None,
    json_output: Json = False,
) -> None:
    """Measure the token-weighted loss and perplexity of a run on a file or on its own evaluation
    rows, in the run's precision.

    For a diffusion run, this is the loss on the pictures of a folder or file at fixed noise levels.

    Examples:

        isotype eval runs/qwen held_out.jsonl

        isotype eval runs/flux held_out_pictures
    """
    if on_bad_row not in (None, "error", "skip"):
        raise UsageError(f"--on-bad-row {on_bad_row}: expected error or skip")
    from ..config.kind import DIFFUSION
    from ..config.sources import SourceSpec
    from ..data.sources import require_source
    from ..runs.folder import detect_model_folder, detect_run_kind

    _require_run(run)
    if data is None and (detect_run_kind(run) == DIFFUSION or detect_model_folder(run) is not None):
        raise UsageError(
            f"eval: which file? {run} keeps no evaluation rows that eval can read",
            fix=f"isotype eval {run} FILE",
        )
    if detect_run_kind(run) == DIFFUSION:
        if on_bad_row is not None:
            raise UsageError(f"--on-bad-row has no effect: {run} is a diffusion run")
        _evaluate_pictures(run, str(data), batch_size=batch_size, json_output=json_output)
        return
    if data is not None:
        require_source(SourceSpec(name=data))
    from ..training.console import quiet_libraries

    quiet_libraries()
    from ..config.schema import DataSection
    from ..data.bad_rows import SKIP_FIX
    from ..data.load import load_data
    from ..inference.loaded import load_run
    from ..model.processor import build_picture_reader
    from ..tasks.language.objective import NextToken
    from ..tasks.language.result import evaluate as evaluate_rows

    loaded = load_run(run)
    objective = loaded.config.train.objective
    if data is None and objective != "sft":
        raise UsageError(
            f"eval: {run} learnt from pairs ({objective}): the evaluations in its metrics.jsonl are"
            " of its own pairs, in eval_rewards/...",
            fix=f"isotype eval {run} FILE, with rows of one answer each",
        )
    overrides: dict[str, Any] = {"packing": False}
    if data is not None:
        overrides |= {
            "train": data,
            "eval": None,
            "eval_split": 0.0,
            "limit": None,
            "format": "auto",
            "stream": False,
        }
    if on_bad_row is not None:
        overrides["on_bad_row"] = on_bad_row
    section = DataSection(**{**loaded.config.data.model_dump(), **overrides})
    try:
        pictures = build_picture_reader(loaded.config.model, section, loaded.tokenizer)
        loaded_data = load_data(
            section, loaded.tokenizer, seed=loaded.config.train.seed, pictures=pictures
        )
    except UsageError as error:
        if error.fix != SKIP_FIX:
            raise
        raise UsageError(
            error.message,
            fix=f"isotype eval {run} {data or ''} --on-bad-row skip".replace("  ", " "),
        ) from None
    if data is None:
        rows = loaded_data.eval
        split_facts = loaded_data.facts["eval"]
    else:
        rows = loaded_data.train
        split_facts = loaded_data.facts["train"]
    if not len(rows):
        raise UsageError(
            f"eval: {run} has no evaluation rows (data.eval, data.eval_split): which file?",
            fix=f"isotype eval {run} FILE",
        )
    data = data or "its own evaluation rows"
    left_out = sum(split_facts["bad_rows"].values()) + sum(
        dropped["rows"] for dropped in split_facts["dropped"]
    )
    size = batch_size or loaded.config.train.eval_batch_size or loaded.config.train.batch_size
    evaluation = evaluate_rows(
        loaded.model,
        rows,
        batch_size=size,
        pad_id=loaded.tokenizer.pad_token_id,
        device=loaded.device,
        loss_dtype=loaded.precision.loss,
        objective=NextToken(loaded.config, loaded_data.pictures),
    )
    perplexity = math.exp(min(evaluation.loss, 700.0))
    answer = {
        "run": str(run),
        "taken": loaded.weights_name,
        "data": data,
        "rows": len(rows),
        "left_out": left_out,
        "tokens": evaluation.weight,
    }
    answer["loss"] = evaluation.loss
    if json_output:
        print(json.dumps(answer | {"perplexity": perplexity}))
    else:
        print(
            f"{run} ({loaded.weights_name}) on {data}: loss {evaluation.loss:.4f}, perplexity {perplexity:.2f},"
            f" {pluralise(len(rows), 'row')}, {pluralise(evaluation.weight, 'token')}"
            + (f"; {pluralise(left_out, 'row')} left out" if left_out else "")
        )


def _evaluate_pictures(run: Path, data: str, *, batch_size: int | None, json_output: bool) -> None:
    from ..inference.diffusion import evaluate_pictures
    from ..training.console import quiet_libraries

    quiet_libraries()
    weights_name, evaluation = evaluate_pictures(run, data, batch_size=batch_size)
    answer = {
        "run": str(run),
        "taken": weights_name,
        "data": data,
        "rows": evaluation.weight,
        "loss": evaluation.loss,
        "parts": dict(evaluation.losses_by_part),
    }
    if json_output:
        print(json.dumps(answer))
        return
    parts = ", ".join(f"{name} {loss:.4f}" for name, loss in evaluation.losses_by_part.items())
    print(
        f"{run} ({weights_name}) on {data}: loss {evaluation.loss:.4f} of {pluralise(evaluation.weight, 'row')}"
        f" ({parts})"
    )


def _require_run(run: Path) -> None:
    """Raises UsageError for a folder that is not a run, an adapter or a model. The folder is
    checked before the model is loaded, because loading takes seconds.
    """
    from ..runs.folder import detect_model_folder, require_run, split_run_and_adapter

    if detect_model_folder(run) is None:
        require_run(split_run_and_adapter(run)[0])
