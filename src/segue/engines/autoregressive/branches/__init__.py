"""Requests with several outputs: the prompt is computed once, then the sequence branches (`branches`); beam search
chooses its branches anew in each step (`beam_search`, `beam_group`).

Doors: `branches`, `beam_group`.
"""
