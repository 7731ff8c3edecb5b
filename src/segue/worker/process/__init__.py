"""A worker as a process: `forkserver` starts it, `life` is what it does from start to end, `ranks` and `compilers` are
the processes next to it, `device` is where it computes, `shared_weights` what it shares with other workers, and
`processes` has the calls of Linux for all of these.

Doors: `device`, `forkserver`, `life`, `ranks`, `shared_weights`.
"""
