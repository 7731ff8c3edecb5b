"""Every type that crosses a process, its codecs (`wire`; `process` for the fork server), and the error tree. It
imports neither torch nor any other package of Segue.

Doors: every module.
"""
