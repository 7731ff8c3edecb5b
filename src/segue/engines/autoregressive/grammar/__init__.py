"""Structured output by xgrammar. `grammar` masks the tokens that a grammar forbids, `process` compiles grammars in
separate processes that are killed when they take too long, `shared` gives the ranks of a replica one grammar, and the
other modules check the client's input.

Optional reading: a sequence has a `Form`, which says which tokens are allowed next and is told each one that is taken.

Doors: `grammar`, `process`, `after_thoughts`, `shared`.
"""
