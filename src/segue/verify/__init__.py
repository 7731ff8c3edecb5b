"""`segue verify DIR`: compare Segue's answers for a checkpoint with those of the library that has its networks.

`command.py` is the entry point. Segue serves a few fixed requests (`questions.py`, `segue_side.py`), then the library's
own call answers the same in a separate process (`library_process.py`, with the family's `reference_module`), so that
the weights are in memory only once; `compare.py` judges, `report.py` prints. The command's process imports no torch.

Doors: `arguments`, `command`.
"""
