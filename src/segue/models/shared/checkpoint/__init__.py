"""Locate and read a checkpoint on disk: its JSON files and location (`files`, no torch), the sizes of its weights
(`stored`, no torch), its tensors (`checkpoint`), and a whole model of `transformers` (`pretrained`), quantised ones too
(`packed`).

Doors: `checkpoint`, `files`, `pretrained`, `stored`.
"""
