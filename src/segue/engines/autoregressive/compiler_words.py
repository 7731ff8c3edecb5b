"""What xgrammar says of a source that it cannot compile, in words that a client can do something with."""

from __future__ import annotations

import re

_WHERE = re.compile(r"^(\[[\d:]+\] )?(\S+\.(cc|cpp|h):\d+: )?(Check failed: \(.*?\) is \w+: )?")
"""Time and place in its own source, and what it looked at there, that xgrammar puts before what is wrong."""
_PLACE = re.compile(r"^EBNF (?:lexer|parser) error at (line \d+, column \d+): (.*)$", re.DOTALL)
_TYPES = "string, number, integer, boolean, null, array or object"

# (what it says, what we say)
_WORDS: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern, re.DOTALL), words)
    for pattern, words in (
        (r"^Regex parsing error at position (\d+): (.*?)\.?$", r"at character \1 of its regular expression: \2"),
        (r"^Invalid structural tag error: (.*)$", r"\1"),
        (r"^Invalid JSON (?:schema )?error: (.*)$", r"\1"),
        (r"^Unsupported type (\".*\")$", rf"type is \1; it must be {_TYPES}"),
        (r"^Type should be a string$", f"type must be {_TYPES}, or a list of them"),
        (
            r"^Schema should be an object or bool, but got (.*)$",
            r"\1 is no schema; it must be an object, true or false",
        ),
        (r"^Schema 'false' cannot accept any value$", "no value fits false"),
        (r"^Cannot find field .* in (#\S*)$", r"$ref is '\1', and there is no such place in the schema"),
        (r"^Invalid range: .*$", "no number is within its bounds (minimum, maximum and the like)"),
        (r"^Value must be a number$", "its bounds (minimum, maximum and the like) must be numbers"),
        (r"^Integer constraint must be a whole number$", "bounds of an integer must be whole numbers"),
        (r"^Integer exceeds m\w+ limit$", "bounds of an integer must be of 64 bits"),
        (r"^Invalid repetition range (\{.*\})$", r"a length or a repetition of \1 is not possible"),
        (r"^Format type not recognized: (.*)$", r"there is no format of type '\1'"),
        (r"^(\w+) format('s)? ", r"the format \1\2 "),
    )
)


def in_our_words(kind: str, said: str) -> str:
    """`said`: what xgrammar raised for a source of this `kind`. Where it is of a grammar that xgrammar made itself of
    something else, its lines and columns say nothing to a client and are left out."""
    said = _WHERE.sub("", said.strip())
    if (found := _PLACE.match(said)) is not None:
        said = f"at {found[1]}: {found[2]}" if kind == "grammar" else found[2]
    for pattern, words in _WORDS:
        said = pattern.sub(words, said)
    return said
