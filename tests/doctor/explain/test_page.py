"""The pages say how to decide between the causes of an error."""

from __future__ import annotations

from isotype.doctor.explain import explain
from isotype.pages import page
from tests.api import MESSAGE_EXAMPLES, codes, read_situation, recognise_error
from tests.api import explainer_FAMILIES as FAMILIES


def recognise_example(example: str):
    prefix = "" if "Error:" in example else "RuntimeError: "
    return recognise_error(prefix + example, read_situation(()))


def test_every_page_lists_its_causes_and_messages():
    for section in FAMILIES.values():
        titles = [entry.title for entry in section.entries[1:] if not entry.is_include]
        text = page(section.code)
        assert all(f"| {title} |" in text for title in titles if "{" not in title)
    for _, example in MESSAGE_EXAMPLES:
        error = recognise_example(example)
        if error is not None and "…" not in example:
            quoted = example.replace("`", "'")
            assert f"`{quoted}`" in page(FAMILIES[error.operator].code)


def test_every_page_names_the_command_that_decides():
    for code in codes():
        commands = {"isotype doctor run SCRIPT.py", "isotype doctor kernels FILE.py"}
        text = page(code)
        assert sum(f"`{command}` decides" in text for command in commands) == 1
        assert {"Half", "float16"} <= set(text.split())
        assert "{" not in text.partition("## How to decide")[2].replace("got {…}", "")


def test_every_example_has_the_message_of_its_template():
    """An example with … leaves out a part of the message."""
    for operator, example in MESSAGE_EXAMPLES:
        if "…" in example:
            continue
        error = recognise_example(example)
        assert error is not None, (operator, example)
        assert error.operator == operator or operator in ("two dtypes", "old type check")


def test_a_decided_cause_stands_on_its_page():
    (finding,) = explain(["TypeError: Got unsupported ScalarType BFloat16"])
    assert finding.cause.partition(":")[0].split("(")[0] in page(finding.code)
