"""Code that all generating endpoints share: sampling parameters and their checks, and running a request's generations.

Doors: `generations`, `parameters`, `sampling`, `text_requests`, `usage`.
"""
