"""`isotype chat RUN`: a conversation with a run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

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
