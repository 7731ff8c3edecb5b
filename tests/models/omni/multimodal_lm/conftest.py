"""Puts this folder, which has what its tests share, on their import path."""
