"""Requests with several outputs: the prompt is computed once, then the sequence branches (`branches`); beam search
chooses its branches anew in each step (`beam_search`, `beam_group`).

Optional reading: the engine asks `branches` for the further sequences of a request; a step hands their candidates to
its `BeamGroup` or `Forks`, which says who goes on.

Doors: `branches`, `beam_group`.
"""
