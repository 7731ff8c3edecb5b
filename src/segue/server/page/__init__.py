"""The web page at `/`, in one file, and the model's own examples, which it offers (`examples`).

Doors: `page`.
"""
