"""The web page at `/`, in one file.

Doors: `page`.
"""
