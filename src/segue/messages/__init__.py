"""Every type that crosses a process, the one codec for them (`wire`), and the error tree. This package imports neither
torch nor any other package of Segue.

Doors: every module.
"""
