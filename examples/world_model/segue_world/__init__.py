"""A model that no library has, served: a small video model that is told what to do in each frame."""
