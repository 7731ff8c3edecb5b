"""Families that generate images and video by diffusion, on the networks of `diffusers`; `generic_pipeline` runs any
other pipeline of the library.

Doors: the `family` of each.
"""
