"""The networks as their author trained them, independent of Segue."""

from __future__ import annotations

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import nn


class World(nn.Module):
    """Predicts the velocity of a rectified flow over the latents of a video."""

    def __init__(self, channels: int = 4, width: int = 32, actions: int = 3, layers: int = 3) -> None:
        super().__init__()
        self.enter = nn.Conv3d(channels, width, 3, padding=1)
        self.time = nn.Linear(1, width)
        self.action = nn.Linear(actions, width)
        self.layers = nn.ModuleList(nn.Conv3d(width, width, 3, padding=1) for _ in range(layers))
        self.leave = nn.Conv3d(width, channels, 1)

    def forward(self, latents: torch.Tensor, time: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        """[B, channels, frames, h, w], [B] in [0, 1], [B, frames, actions] → [B, channels, frames, h, w]."""
        condition = self.time(time[:, None])[:, None] + self.action(actions)
        hidden = self.enter(latents)
        for layer in self.layers:
            hidden = hidden + layer(nn.functional.silu(hidden + condition.movedim(2, 1)[..., None, None]))
        return self.leave(hidden)


class Frames(nn.Module):
    """Decodes latents to frames, each 4 times as high and as wide."""

    def __init__(self, channels: int = 4) -> None:
        super().__init__()
        self.grow = nn.ConvTranspose3d(channels, 3, (1, 4, 4), stride=(1, 4, 4))

    def forward(self, latents: torch.Tensor) -> torch.Tensor:
        """[B, channels, frames, h, w] → [B, 3, frames, 4h, 4w], about -1 to 1."""
        return torch.tanh(self.grow(latents))


@torch.inference_mode()
def sample(
    world: World, frames: Frames, scheduler: FlowMatchEulerDiscreteScheduler, actions: torch.Tensor, *, height: int,
    width: int, steps: int, seed: int
) -> torch.Tensor:  # fmt: skip
    """Make one video with the author's own sampling loop: [frames, height, width, 3] in [0, 1]."""
    shape = (1, world.enter.in_channels, len(actions), height // 4, width // 4)
    latents = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    scheduler.set_timesteps(steps)
    for timestep in scheduler.timesteps:
        velocity = world(latents, timestep[None] / 1000, actions[None])
        [latents] = scheduler.step(velocity, timestep, latents, return_dict=False)
    return (frames(latents)[0] / 2 + 0.5).movedim(0, -1)
