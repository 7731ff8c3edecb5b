"""Calls as a Python list that is the whole reply: `[look(where="left", far=True), wait()]` (Llama 4, small Llama 3.2).

Only its last bracket shows that a reply is such a list: calls are emitted complete, at the end.
"""

from __future__ import annotations

import ast
import json
from typing import Any

from segue.models.shared.dialects.pieces import CallArguments, CallBegun, Machine, ReplyPiece, Said

_BEFORE, _AFTER = "<|python_start|>", "<|python_end|>"


class PythonicParser(Machine):
    def __init__(self) -> None:
        super().__init__()
        self.state = self._beginning

    def _beginning(self) -> bool:
        shown = self.buffer.lstrip()
        if not self.ended and (not shown or _BEFORE.startswith(shown)):
            return False
        self.state = self._list if shown.startswith(("[", _BEFORE)) else self._text
        return True

    def _text(self) -> bool:
        if self.buffer:
            self.out.append(Said(self.take(len(self.buffer))))
        return False

    def _list(self) -> bool:
        if not self.ended:
            return False
        text = self.take(len(self.buffer))
        inside = text.strip().removeprefix(_BEFORE).removesuffix(_AFTER).strip()
        self.out += _calls(inside) or [Said(text)]
        self.state = self._text
        return False


def _calls(text: str) -> list[ReplyPiece]:
    """The calls of a list; empty for any other text."""
    try:
        tree = ast.parse(text, mode="eval").body
        if not isinstance(tree, ast.List):
            return []
        calls = [_call(index, element) for index, element in enumerate(tree.elts)]
    # all exceptions of parsing untrusted text
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return []
    return [piece for call in calls for piece in call]


def _call(index: int, element: ast.expr) -> list[ReplyPiece]:
    if not (isinstance(element, ast.Call) and isinstance(element.func, ast.Name | ast.Attribute) and not element.args):
        raise ValueError("not a call with named arguments")
    arguments: dict[str, Any] = {}
    for keyword in element.keywords:
        if keyword.arg is None:
            raise ValueError("** in a call")
        arguments[keyword.arg] = ast.literal_eval(keyword.value)
    written = json.dumps(arguments, ensure_ascii=False)
    return [CallBegun(index, ast.unparse(element.func)), CallArguments(index, written)]
