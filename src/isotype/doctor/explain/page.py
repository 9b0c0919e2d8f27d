"""Writes the pages about the codes of `explain`. A page contains the explanation from the text file
of the code, the messages that have this code, their possible causes, and for each cause the
evidence in a log that shows it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from ...pages.sheets import Entry, Section
from .explainer import FAMILIES, SHARED_CAUSES, find_deciding_command
from .facts import ErrorFacts
from .recognition import DTYPE_ROLES, MESSAGE_EXAMPLES, MESSAGE_TEMPLATES
from .situation import RecognisedError

_HOW_TO_DECIDE = """## How to decide

`isotype doctor explain LOG` calls a cause decided only if the log contains a proof of it: a message
that is its own cause, or a text that shows what made the dtype. Otherwise it lists up to three
possible causes, each with the sign that confirms it."""
_DECIDING_COMMANDS = {
    "isotype doctor run SCRIPT.py": """
`isotype doctor run SCRIPT.py` decides between the causes. It runs the program until the error
occurs. Then it reads from the running program the operands' dtypes, the module, the autocast state
and the settings.
""",
    "isotype doctor kernels FILE.py": """
`isotype doctor kernels FILE.py` decides between the causes. It compiles the kernels of the file for
each combination of dtypes, without a GPU, and reports the line of each fault.
""",
}
# People search for the words of an error, and the examples below contain only some dtypes.
_DTYPE_NAMES = """The messages below name two dtypes as an example; the causes are the same for others:
Float or float32 (fp32), Half or float16 (fp16), BFloat16 or bfloat16 (bf16), Double or float64
(fp64)."""
# If an operator is inferred from the traceback, its messages are listed for the usual operator.
_USUAL_OPERATORS = {"two dtypes": "matrix product", "old type check": "convolution"}
_PLACEHOLDER = re.compile(r"(?<!\{)\{([^{}]+)\}(?!\})")


def codes() -> list[str]:
    return sorted({section.code for section in FAMILIES.values()})


def page(code: str) -> str | None:
    """Returns the page that `isotype doctor explain CODE` prints; None for an unknown code."""
    sections = {section.header: section for section in FAMILIES.values() if section.code == code}
    if not sections:
        return None
    first = next(iter(sections.values()))
    error = RecognisedError(text="", operator=_list_operators(first)[0])
    command = find_deciding_command(error, code)
    parts = [first.to_page().strip(), _HOW_TO_DECIDE, _DECIDING_COMMANDS[command].strip()]
    parts.append(_DTYPE_NAMES)
    parts += [_describe_section(section) for section in sections.values()]
    return "\n\n".join(parts) + "\n"


def _list_operators(section: Section) -> list[str]:
    return section.header.split("; ")


def _describe_section(section: Section) -> str:
    """Describes the messages and the possible causes of one section."""
    operators = _list_operators(section)
    facts = _define_variables(section, operators[0])
    title = section.entries[0].text("message", facts).rstrip(": ")
    examples = dict.fromkeys(
        text for name, text in MESSAGE_EXAMPLES if _USUAL_OPERATORS.get(name, name) in operators
    )
    lines = [f"### {title}", ""]
    if examples:
        lines += [*(f"* `{_escape_code(text)}`" for text in examples), ""]
    lines += ["| possible cause | in a log | sign |", "|---|---|---|"]
    for entry in _collect_entries(section):
        cause = _format_text(entry.title, facts)
        signs = _collect_texts(entry, "sign", facts)
        cells = (cause, _describe_evidence(entry, facts), "; or ".join(signs))
        lines.append(f"| {' | '.join(map(_escape_cell, cells))} |")
    return "\n".join(lines)


def _define_variables(section: Section, operator: str) -> ErrorFacts:
    """Defines the variables of the section for an example of its errors, whose dtypes are
    alternately fp32 and bf16. Texts that always need a part of the message get `…` instead.
    """
    form = next((form for name, form in MESSAGE_TEMPLATES if name == operator), "")
    names = re.findall(r"<(\w+)>", form)
    roles = [name for name in names if name in DTYPE_ROLES]
    dtypes = {role: ("fp32", "bf16")[index % 2] for index, role in enumerate(roles)}
    if "_dtype" in names:
        dtypes["missing"] = "bf16"
    captures = {name[1:].rstrip("2"): "…" for name in names if name.startswith("_")}
    try:
        facts = ErrorFacts(RecognisedError(text="", operator=operator, dtypes=dtypes))
        section.define_variables(facts)
        section.entries[0].text("message", facts)
    except KeyError:
        error = RecognisedError(text="", operator=operator, dtypes=dtypes, captures=captures)
        facts = ErrorFacts(error)
        section.define_variables(facts)
    return facts


def _collect_entries(section: Section) -> Iterator[Entry]:
    for entry in section.entries[1:]:
        if entry.is_include:
            yield from SHARED_CAUSES[entry.title]
        else:
            yield entry


def _describe_evidence(entry: Entry, facts: ErrorFacts) -> str:
    proofs = _collect_texts(entry, "proof", facts)
    parts = [f"decides: {'; or '.join(proofs)}"] if proofs else []
    if texts := [text for text in _collect_texts(entry, "evidence", facts) if text not in proofs]:
        parts.append("; or ".join(texts))
    return "; ".join(parts) or "none: the log cannot show it"


def _collect_texts(entry: Entry, field_name: str, facts: ErrorFacts) -> list[str]:
    """Returns the texts of a field, for whichever condition. A text that consists of a value of the
    log stands for a line of the traceback.
    """
    texts = dict.fromkeys(
        _format_text(line.text, facts) for line in entry.fields if line.name == field_name
    )
    return ["a line of the traceback" if text == "…" else text for text in texts]


def _format_text(text: str, facts: ErrorFacts) -> str:
    """Replaces the placeholders of a text of a sheet. If a value is known only with a log, it is
    replaced by `…`.
    """

    def find_value(match: re.Match[str]) -> str:
        *names, last = match[1].split("|")
        for name in names or [last]:
            value = facts.variables.get(name) or facts.error.dtypes.get(name)
            if value:
                return str(value)
        if last in ("half", "torch_half", "autocast"):
            return str(getattr(facts.error, last))
        return last if names else "…"

    return _PLACEHOLDER.sub(find_value, text)


def _escape_code(text: str) -> str:
    return text.replace("`", "'")


def _escape_cell(text: str) -> str:
    return text.replace("|", "\\|")
