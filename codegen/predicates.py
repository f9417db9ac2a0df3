"""The table's rows for ops that ask what kind of number an element is. Imports `codegen.expressions` only."""

from __future__ import annotations

from codegen.expressions import Case, Row


def _is(number: str) -> Row:
    def text(case: Case) -> str:
        return f'{{self}} == float("{number}")' if case.is_float else "({self} != {self})"

    return Row(text, "compare")


PREDICATES: dict[str, Row] = {"isneginf": _is("-inf"), "isposinf": _is("inf")}
"""Keyed as `codegen.expressions.ROWS`."""
