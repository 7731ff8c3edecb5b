"""The command line: `segue serve | generate | graph | verify | tiny | bench`. `main` has the commands, `model` the
arguments shared by commands that run a model, `parser` the argument parser of all commands, and `generate` the command
that prints a reply and writes files.

Doors: `parser`.
"""
