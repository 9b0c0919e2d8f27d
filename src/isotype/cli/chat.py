"""Starts a conversation with a trained model (`isotype chat RUN`)."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from .run_options import MaxTokens, RunFolder, Temperature, TopP, require_usable_folder

if TYPE_CHECKING:
    from ..inference.loaded import Conversation


def chat(
    run: RunFolder,
    tokens: MaxTokens = 256,
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
    require_usable_folder(run)
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
