"""The hardware of this host: cores and memory within its cgroups (`hardware`), its GPUs and reasons why one cannot be
used (`gpus`), and the lines that `segue serve` prints about them (`account`).

Doors: `account`, `hardware`.
"""
