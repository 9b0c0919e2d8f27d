"""Computes what data.json says about a run's data, for example the number and the lengths of the
rows, and how many rows are duplicates. This module also makes the messages about the data that are
printed for the user.

In this module, `side` means either the training rows or the evaluation rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..config.schema import DataSection
from ..errors import UsageError
from ..wording import pluralise
from .encode import Encoder, Tally
from .sources import Source
from .tokens import TokenRows

MIN_ROWS_TO_HOLD_OUT = 10  # with fewer rows none is held out
_MAX_KEYS = 10  # number of a source's unused keys that notes name


def data_facts(
    data: DataSection,
    encoder: Encoder,
    sides: Sequence[TokenRows],
    tallies: Sequence[Tally],
    total_tally: Tally,
    files: Sequence[Any],
    *,
    held_out: bool,
) -> dict[str, Any]:
    """Returns the content of data.json that describes the rows. If the data are a stream, only its
    first rows are described.

    sides, tallies, files  each has two entries, one for the training rows and one for the
                           evaluation rows
    total_tally            the sum of the tallies
    """
    train, evaluation = (side_facts(*side) for side in zip(sides, tallies, files, strict=True))
    return {
        "train": train,
        "eval": evaluation | {"held_out": held_out},
        **overlap_facts(*sides),
        "max_length": data.max_length,
        "loss_on": data.loss_on,
        "eval_split": data.eval_split if held_out else None,
        "template": template_facts(encoder),
        "tokens": token_facts(encoder, sides, total_tally),
    }


def collect_tallies(sides: Sequence[TokenRows], *, refuse: bool) -> tuple[list[Tally], Tally]:
    """Returns the counts that were made while the training rows and the evaluation rows were read,
    and the sum of these counts. If `refuse` is true, raises UsageError if there are bad rows.
    """
    tallies = [Tally.sum(block.facts["tally"] for block in side.blocks) for side in sides]
    total_tally = Tally.sum(tally.to_dict() for tally in tallies)
    if refuse:
        total_tally.bad.refuse(usable_rows=sum(map(len, sides)))
    return tallies, total_tally


def side_facts(rows: TokenRows, tally: Tally, files: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns what data.json says about the training rows or about the evaluation rows."""
    lengths = np.sort(rows.lengths).tolist()
    digests = rows.column("digest")
    return {
        "files": files,
        "rows": len(rows),
        "tokens": sum(lengths),
        "supervised_tokens": int(rows.column("supervised").sum()),
        "truncated": int(rows.column("cut").sum()),
        "bad_rows": dict(tally.bad.kinds.most_common()),
        "dropped": [
            {"why": reason, "rows": count, "first": tally.first_dropped[reason]}
            for reason, count in tally.dropped.most_common()
        ],
        "duplicates": len(digests) - len(np.unique(digests)),
        "lengths": {
            name: lengths[min(len(lengths) - 1, int(len(lengths) * share))] if lengths else 0
            for name, share in (("shortest", 0.0), ("median", 0.5), ("p95", 0.95), ("longest", 1.0))
        },
    }


def eval_set_sizes(sources: Sequence[Source], rows: TokenRows) -> dict[str, int]:
    """Returns the number of rows of each named evaluation set. Raises UsageError for a set without
    rows.
    """
    counts: Counter[str] = Counter()
    for i, source in enumerate(sources):
        if source.spec.group:
            counts[source.spec.group] += len(rows.block_row_numbers(i))
    if empty := [name for name, count in counts.items() if not count]:
        raise UsageError(f"data.eval.{empty[0]}: no row is left of this set")
    return dict(counts)


def overlap_facts(train: TokenRows, evaluation: TokenRows) -> dict[str, int]:
    """Counts the evaluation rows that are also training rows. Among the other evaluation rows,
    counts those whose prompt is also the prompt of a training row, unless all training rows have
    the same prompt.
    """
    copies = np.isin(evaluation.column("digest"), train.column("digest"))
    prompts = evaluation.column("prompt")
    train_prompts = train.column("prompt")
    has_several_prompts = len(np.unique(train_prompts)) > 1
    shared = np.isin(prompts, train_prompts) & (prompts != 0) & ~copies
    return {
        "duplicates_between": int(copies.sum()),
        "prompts_between": int(shared.sum()) if has_several_prompts else 0,
    }


def token_facts(encoder: Encoder, sides: Sequence[TokenRows], total_tally: Tally) -> dict[str, Any]:
    """Returns the special tokens, and how many rows begin or end with them."""
    tokenizer = encoder.tokenizer
    bos = tokenizer.bos_token_id
    eos = tokenizer.eos_token_id
    pad = tokenizer.pad_token_id
    bos_once, bos_twice, eos_at_end = sum(
        (side.count_bos_and_eos(bos, eos) for side in sides), np.zeros(3, np.int64)
    ).tolist()
    return {
        "eos": {"token": tokenizer.eos_token, "id": eos},
        "pad": {
            "token": tokenizer.pad_token,
            "id": pad,
            "same_as_eos": eos is not None and pad == eos,
        },
        "bos": {
            "token": tokenizer.bos_token,
            "id": bos,
            "rows_beginning_with_it": bos_once,
            "rows_beginning_with_two": bos_twice,
        },
        "answers_tokenised_apart": total_tally.borders,
        "end_of_turn": dict(total_tally.end_of_turn.most_common()),
        "rows_ending_in_eos": eos_at_end,
    }


def template_facts(encoder: Encoder) -> dict[str, Any] | None:
    """Returns what data.json says about the chat template: where it comes from, its settings, and
    whether it marks the text to learn with {% generation %}.
    """
    template = encoder.template
    if template is None:
        return None
    return {
        "source": template.source,
        "has_generation_block": template.has_generation_block,
        "kwargs": dict(template.default_kwargs),
        "thoughts": template.thoughts,
    }


def source_lines(facts: dict[str, Any], *, max_lines: int = 6) -> list[str]:
    """Returns one line for each source. The line contains the number of rows, the format, and how
    the format was recognised.
    """
    lines = []
    for name, side in (("training", facts["train"]), ("evaluation", facts["eval"])):
        for file in side["files"]:
            rows = pluralise(file["rows"], "row") if "rows" in file else "a stream"
            file_count = f"{file['files']} files, " if "files" in file else ""
            lines.append(
                f"{file['path']} ({name}): {file_count}{rows}, {file['format']}: {file['why']}"
            )
    if len(lines) <= max_lines:
        return lines
    return [*lines[: max_lines - 1], f"and {len(lines) - max_lines + 1} more: data.json"]


def data_notes(facts: dict[str, Any], encoder: Encoder, total_tally: Tally) -> list[str]:
    """Returns messages for the user. Each message is one sentence. `total_tally` is the sum of the
    counts of the training and the evaluation rows.
    """
    sides = (("training", facts["train"]), ("evaluation", facts["eval"]))
    notes = []
    for name, side in sides:
        notes += _left_out_notes(name, side, encoder.max_length)
        notes += _ignored_key_notes(side)
    notes += _length_notes(facts, encoder)
    notes += _split_notes(facts)
    notes += _mix_notes(facts)
    for name, side in sides:
        notes += [
            f"{file['path']}: {name} tokens {file['cache']}"
            for file in side["files"]
            if "cache" in file
        ]
    if duplicates := facts["train"]["duplicates"]:
        notes.append(
            f"{pluralise(duplicates, 'training row repeats', 'training rows repeat')}"
            " another row exactly"
        )
    notes += _special_token_notes(facts, encoder)
    if total_tally.empty_thoughts:
        notes.append(_empty_thoughts_note(encoder, total_tally.empty_thoughts))
    notes += _omission_notes(total_tally)
    return notes


def _left_out_notes(name: str, side: dict[str, Any], max_length: int) -> list[str]:
    """Returns messages about training rows or evaluation rows that were cut or dropped, or that
    cannot be used.
    """
    notes = []
    if count := side["truncated"]:
        verb = "was" if count == 1 else "were"
        rows = f"{pluralise(count, f'{name} row')} ({count / max(1, side['rows']):.1%})"
        notes.append(f"{rows} {verb} longer than data.max_length {max_length} and {verb} cut")
    if counts := side["bad_rows"]:
        common = Counter(counts).most_common(3)
        kinds = "; ".join(f"{n:,} x {kind}" for kind, n in common)
        if len(counts) > len(common):
            kinds += f"; and {pluralise(len(counts) - len(common), 'more kind')}: data.json"
        rows = pluralise(sum(counts.values()), f"bad {name} row is", f"bad {name} rows are")
        notes.append(f"{rows} left out (data.on_bad_row: skip): {kinds}")
    notes += [
        f"{pluralise(dropped['rows'], f'{name} row')} dropped: {dropped['why']} (first: {dropped['first']})"
        for dropped in side["dropped"]
    ]
    return notes


def _ignored_key_notes(side: dict[str, Any]) -> list[str]:
    """Returns messages about keys in the training files or in the evaluation files that Isotype
    does not use.
    """
    notes = []
    for file in side["files"]:
        ignored = file.get("ignored_keys", {})
        notes += [
            f"{file['path']}: the key {key or '(without a name)'} is not read"
            f" ({pluralise(count, 'row')})"
            for key, count in list(ignored.items())[:_MAX_KEYS]
        ]
        if len(ignored) > _MAX_KEYS:
            more = pluralise(len(ignored) - _MAX_KEYS, "more key is", "more keys are")
            notes.append(f"{file['path']}: {more} not read: data.json")
    return notes


def _length_notes(facts: dict[str, Any], encoder: Encoder) -> list[str]:
    """Returns a message if rows are longer than the tokenizer's maximum."""
    longest = max(side["lengths"]["longest"] for side in (facts["train"], facts["eval"]))
    limit = encoder.tokenizer.model_max_length
    if longest <= limit:
        return []
    return [
        f"rows have up to {pluralise(longest, 'token')}, and the tokenizer says its model takes"
        f" {limit}: lower data.max_length"
    ]


def _split_notes(facts: dict[str, Any]) -> list[str]:
    """Returns messages if there are no evaluation rows, or if training rows repeat evaluation rows
    or their prompts.
    """
    notes = []
    train = facts["train"]
    evaluation = facts["eval"]
    if evaluation["held_out"] and not evaluation["rows"] and facts["eval_split"]:
        if "pairs" in train:
            count = train["pairs"]
            noun = "pair"
        else:
            count = train["rows"]
            noun = "row"
        if count < MIN_ROWS_TO_HOLD_OUT:
            reason = f"only {pluralise(count, noun)}"
        else:
            reason = "the random choice selected no row (copies of a row stay together)"
        notes.append(f"{reason}: none is held out for evaluation")
    if facts["duplicates_between"]:
        rows = pluralise(
            facts["duplicates_between"],
            "evaluation row is also a training row",
            "evaluation rows are also training rows",
        )
        notes.append(f"{rows}: the evaluation loss is too good")
    if facts["prompts_between"]:
        rows = pluralise(facts["prompts_between"], "evaluation row has", "evaluation rows have")
        if evaluation["held_out"]:
            fix = "; to keep the rows of a prompt on one side, give data.eval"
        else:
            fix = ""
        notes.append(
            f"{rows} the prompt of a training row, with another answer: the evaluation loss may be"
            f" too good{fix}"
        )
    return notes


def _mix_notes(facts: dict[str, Any]) -> list[str]:
    """Returns messages about the shares of weighted sources, and about packing."""
    notes = [
        f"{source['path']}: {source['share']:.1%} of the training rows; each of its rows comes"
        f" {source['passes']:.3g} times an epoch"
        for source in facts.get("mix") or []
    ]
    if packing := facts.get("packing"):
        notes.append(
            f"{pluralise(packing['rows'], 'row')} packed into {packing['packed_rows']:,} of"
            f" {pluralise(packing['length'], 'token')}, {packing['filled']:.1%} full"
        )
    return notes


def _special_token_notes(facts: dict[str, Any], encoder: Encoder) -> list[str]:
    """Returns messages about special tokens that are missing in rows or occur twice, and about
    properties of the template that the user may not expect.
    """
    notes = []
    tokens = facts["tokens"]
    template = facts["template"]
    if template and template["source"] == "default":
        notes.append(
            "the tokenizer has no chat template: rows use the plain default (User: ..., Assistant:"
            " ...), which is saved with the result"
        )
    if template and (count := tokens["end_of_turn"].get("none")):
        answers = pluralise(count, "answer ends", "answers end")
        notes.append(
            f"{answers} without an end-of-turn token: the model will not learn to stop there"
        )
    if encoder.tokenizer.eos_token_id is None:
        notes.append(
            "the tokenizer has no end-of-text token: plain texts are learnt without an end"
        )
    if count := tokens["bos"]["rows_beginning_with_two"]:
        rows = pluralise(count, "row begins", "rows begin")
        notes.append(
            f"{rows} with two {tokens['bos']['token']}: the text or the template repeats it"
        )
    if template and template["has_generation_block"] and encoder.loss_on == "assistant":
        notes.append(
            "the template marks with {% generation %} what is learnt; answers are found by"
            " rendering, with their thoughts and end of turn"
        )
    return notes


def _empty_thoughts_note(encoder: Encoder, count: int) -> str:
    template = encoder.template
    fix = ""
    if (
        template is not None
        and template.reads_key("enable_thinking")
        and not template.default_kwargs
    ):
        fix = "; data.template_kwargs: {enable_thinking: false} makes them a part of the prompt"
    rows = pluralise(count, "row learns", "rows learn")
    return f"{rows} empty thoughts (<think></think>){fix}"


def _omission_notes(total_tally: Tally) -> list[str]:
    """Returns messages about parts of conversations that the chat template does not write, and
    about texts that contain special tokens.
    """
    omitted = "that the chat template does not write"
    counts = [
        (total_tally.calls_unseen, f"tool calls {omitted}: they are not learnt"),
        (total_tally.tools_unseen, f"tools {omitted}: the model does not see them"),
        (total_tally.reasoning_unseen, f"reasoning {omitted}: it is not learnt"),
        *(
            (count, f"a turn of the role {role!r} {omitted}: the model does not see it")
            for role, count in total_tally.turns_unseen.most_common()
        ),
        (
            total_tally.special_in_content,
            "the text of a special token in their content; the tokenizer reads it as that token",
        ),
    ]
    return [f"{pluralise(count, 'row has', 'rows have')} {text}" for count, text in counts if count]
