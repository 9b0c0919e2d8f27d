"""`isotype chat RUN`: a conversation with a run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from .app import RUNS


def register(app: typer.Typer) -> None:
    app.command(name="chat", rich_help_panel=RUNS)(chat)


def chat(
    run: Annotated[Path, typer.Argument(help="The run's folder, finished or not.")],
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Longest answer in tokens.")] = 256,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0, help="0 is greedy.")] = 0.7,
    top_p: Annotated[float, typer.Option("--top-p", min=0.0, max=1.0, help="The share of probability drawn from.")] = 0.9,
) -> None:
    """Talk with a run, under its own precision and template. /clear forgets what was said, /quit or Ctrl-D ends.

    Examples:

        isotype chat runs/qwen

        echo "What does os.path.join do?" | isotype chat quickstart/tune --temperature 0
    """
    from ..training.quiet import quiet_libraries

    quiet_libraries()
    from ..inference.conversation import Conversation
    from ..inference.loaded import load_run

    loaded = load_run(run)
    conversation = Conversation(loaded, max_new_tokens=tokens, temperature=temperature, top_p=top_p)
    prompt = "> " if sys.stdin.isatty() else ""
    if prompt:
        print(f"{run} ({loaded.taken}). /clear forgets, /quit ends.")
    while True:
        try:
            said = input(prompt).strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if said in ("/quit", "/exit"):
            return
        if said == "/clear":
            conversation.clear()
        elif said:
            conversation.say(said)
