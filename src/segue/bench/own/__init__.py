"""`segue bench own`: the example of a model of one's own. The author's side runs in a process of its own.

Doors: `arguments`, `results`.
"""
