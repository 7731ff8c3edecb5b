"""Wan 2.1 and 2.2 (Wan-AI): text and pictures to video, on diffusers' networks."""
