"""Answers prompts with a trained model, or draws pictures with it (`isotype sample RUN`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import UsageError
from .run_options import JsonOutput, MaxTokens, RunFolder, Temperature, TopP


def sample(
    context: typer.Context,
    run: RunFolder,
    prompt: Annotated[
        list[str] | None,
        typer.Argument(metavar="[PROMPT ...]", help="Prompts; the run's own by default."),
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option("--prompts", help="A file with one prompt per line.")
    ] = None,
    tokens: MaxTokens = 128,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    control: Annotated[
        list[Path] | None,
        typer.Option(
            "--control",
            help="The picture that the prompts edit. Repeat it for several reference pictures.",
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option("--seed", help="Seed of the random numbers of an answer or picture.")
    ] = 0,
    json_output: JsonOutput = False,
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
    from ..tasks.language.sample import sample as sample_answers

    loaded = load_run(run)
    prompts_to_answer: list[Any] = texts or list(loaded.config.run.samples)
    is_model_folder = detect_model_folder(run) is not None
    # The folder of a run says whether the training rows were chats. For any other folder we assume
    # it. A prompt is then rendered with the chat template, as the message of a user
    is_chat = is_model_folder or _is_chat_run(run)
    template = loaded.tokenizer.chat_template if is_chat else None
    if not prompts_to_answer and is_model_folder:
        raise UsageError(
            f"{run}: not the folder of a run, so it has no prompts of its own",
            fix=f'isotype sample {run} "a question"',
        )
    picture_reader = None
    if prompts_to_answer:
        rendered = user_prompts(prompts_to_answer, loaded.tokenizer, chat_template=template)
    else:
        picture_reader = build_picture_reader(
            loaded.config.model, loaded.config.data, loaded.tokenizer
        )
        rendered = list(
            load_data(
                loaded.config.data,
                loaded.tokenizer,
                seed=loaded.config.train.seed,
                pictures=picture_reader,
            ).prompts
        )
    torch.manual_seed(seed)
    answers = sample_answers(
        loaded.model,
        loaded.tokenizer,
        rendered,
        max_new_tokens=tokens,
        device=loaded.device,
        temperature=temperature,
        top_p=top_p,
        pictures=picture_reader,
    )
    if json_output:
        print(
            json.dumps(
                {
                    "run": str(run),
                    "weights": loaded.weights_name,
                    "samples": [answer.to_dict() for answer in answers],
                }
            )
        )
        return
    print(f"{run} ({loaded.weights_name})")
    for answer in answers:
        print(f"\n> {answer.prompt}\n{remove_control_characters(answer.answer) or '(nothing)'}")


def _draw(
    run: Path,
    texts: list[str],
    *,
    context: typer.Context,
    seed: int,
    controls: list[Path],
    json_output: bool,
) -> None:
    """Draws a picture for each text into RUN/drawn. The numbers of the files continue after the
    existing files.

    controls  the pictures that the texts edit
    """
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
    first = 1 + max(
        (int(file.stem) for file in folder.iterdir() if file.stem.isdecimal()), default=0
    )
    samples: list[dict[str, str]] = []
    for number, picture in enumerate(pictures, start=first):
        suffix, content = picture.file
        file = folder / f"{number}{suffix}"
        file.write_bytes(content)
        samples.append({"prompt": picture.prompt, "file": str(file)})
    if json_output:
        print(json.dumps({"run": str(run), "weights": weights_name, "samples": samples}))
        return
    print(f"{run} ({weights_name})")
    for written_sample in samples:
        print(f"\n> {written_sample['prompt']}\n{written_sample['file']}")


def _is_chat_run(run: Path) -> bool:
    """Returns True if the run was trained on chats. A prompt is then a user's message in a chat."""
    from ..report.record import read_run
    from ..runs.folder import split_run_and_adapter

    return bool(read_run(split_run_and_adapter(run)[0]).data.get("template"))
