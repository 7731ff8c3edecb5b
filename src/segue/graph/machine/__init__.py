"""The hardware of this host: cores and memory within its cgroups (`hardware`), its GPUs and reasons why one cannot be
used (`gpus`), the lines that `segue serve` prints about them (`account`), the memory that further workers would
take (`further`), and the stages of another host on what it has (`hosts`).

Optional reading: `Hardware` describes the host to the planner.

Doors: `account`, `further`, `hardware`, `hosts`.
"""
