"""A worker as a process: `forkserver` starts it, `life` is what it does from start to end, `ranks` and `compilers` are
the processes next to it, `device` is where it computes, and `processes` has the calls of Linux for all of these. By
`shared_weights` it shares weights with other workers: in a `weights_store`, as `host_weights` or `cuda_weights`.

Doors: `device`, `forkserver`, `life`, `ranks`, `shared_weights`, `weights_store`.
"""
