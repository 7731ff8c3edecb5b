"""The hardware of this host: cores and memory within its cgroups (`hardware`), its GPUs and reasons why one cannot be
used (`gpus`), the lines that `segue serve` prints about them (`account`), and the memory that further workers would
take (`further`).

Doors: `account`, `further`, `hardware`.
"""
