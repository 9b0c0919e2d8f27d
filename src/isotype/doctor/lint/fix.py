"""Applies edits to source with libcst, so that comments and layout stay as they were. Imported only when `--fix` has something to mend.

Edits name what they change by the position that `ast` gave; libcst counts columns in characters and `ast` in bytes, so positions are
converted line by line. An edit whose place is no longer found is skipped and reported.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import UsageError
from .rule import Edit

Span = tuple[int, int, int, int]


def apply_edits(source: bytes, edits: Sequence[Edit]) -> tuple[bytes, int]:
    """The new source, in its own encoding and with its own line ends, and how many of the edits were made.

    Raises  UsageError when libcst is not installed.
    """
    try:
        import libcst as cst
        from libcst.metadata import MetadataWrapper, PositionProvider
    except ModuleNotFoundError:
        raise UsageError("--fix needs libcst: pip install 'isotype[fix]'") from None

    module = cst.parse_module(source)
    lines = source.decode(module.encoding).splitlines()

    def column(line: int, offset: int) -> int:
        return len(lines[line - 1].encode()[:offset].decode(errors="ignore"))

    wanted: dict[Span, Edit] = {}
    by_start: dict[int, Edit] = {}
    for edit in edits:
        if edit.kind == "finally":
            by_start[edit.line] = edit
        else:
            span = (edit.line, column(edit.line, edit.column), edit.end_line, column(edit.end_line, edit.end_column))
            wanted[span] = edit

    class Apply(cst.CSTTransformer):
        METADATA_DEPENDENCIES = (PositionProvider,)

        def __init__(self) -> None:
            super().__init__()
            self.made = 0

        def span(self, node: cst.CSTNode) -> Span:
            where = self.get_metadata(PositionProvider, node)
            return where.start.line, where.start.column, where.end.line, where.end.column

        def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.BaseExpression:
            edit = wanted.get(self.span(original_node))
            if edit is None:
                return updated_node
            self.made += 1
            if edit.kind == "append":
                return cst.parse_expression(cst.Module([]).code_for_node(updated_node) + edit.text)
            name, _, value = edit.text.partition("=")
            argument = cst.Arg(
                keyword=cst.Name(name),
                value=cst.parse_expression(value),
                equal=cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace("")),
            )
            spaced = [
                a.with_changes(comma=cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))) if a.comma is cst.MaybeSentinel.DEFAULT else a
                for a in updated_node.args
            ]
            return updated_node.with_changes(args=[*spaced, argument])

        def leave_IndentedBlock(self, original_node: cst.IndentedBlock, updated_node: cst.IndentedBlock) -> cst.BaseSuite:
            starts = [self.span(statement)[0] for statement in original_node.body]
            body = list(updated_node.body)
            for first, line in enumerate(starts):
                edit = by_start.get(line)
                if edit is None or edit.until not in starts:
                    continue
                last = starts.index(edit.until)
                guarded = cst.Try(
                    body=cst.IndentedBlock(body[first + 1 : last]), finalbody=cst.Finally(body=cst.IndentedBlock([body[last]]))
                )
                self.made += 1
                return updated_node.with_changes(body=[*body[: first + 1], guarded, *body[last + 1 :]])
            return updated_node

    apply = Apply()
    changed = MetadataWrapper(module).visit(apply)
    return changed.bytes, apply.made
