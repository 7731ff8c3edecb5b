"""FLUX.2 and FLUX.2 Klein (black-forest-labs): text to image, and pictures to work from, on diffusers' networks."""
