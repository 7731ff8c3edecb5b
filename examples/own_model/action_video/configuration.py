"""Configuration of the action-conditioned video model."""

from __future__ import annotations

from typing import Any, ClassVar

from transformers import LlamaConfig, PretrainedConfig


class ActionVideoConfig(PretrainedConfig):
    """`trunk`: the Llama that predicts codes; its vocabulary is the codebook and one id that stands for an action."""

    model_type = "action_video"
    sub_configs: ClassVar = {"trunk": LlamaConfig}

    def __init__(
        self,
        image_size: int = 192,
        downsampling: int = 8,
        codebook_size: int = 1024,
        code_width: int = 32,
        image_channels: int = 64,
        actions_per_frame: int = 6,
        action_size: int = 3,
        max_frames: int = 16,
        trunk: LlamaConfig | dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.image_size = image_size
        self.downsampling = downsampling
        self.codebook_size = codebook_size
        self.code_width = code_width
        self.image_channels = image_channels
        self.actions_per_frame = actions_per_frame
        self.action_size = action_size
        self.max_frames = max_frames
        values = trunk.to_dict() if isinstance(trunk, LlamaConfig) else dict(trunk or {})
        values["vocab_size"] = codebook_size + 1
        values["max_position_embeddings"] = max_frames * self.tokens_per_step
        self.trunk = LlamaConfig(**values)
        super().__init__(**kwargs)

    @property
    def tokens_per_frame(self) -> int:
        return (self.image_size // self.downsampling) ** 2

    @property
    def tokens_per_step(self) -> int:
        """Of a frame and the actions after it."""
        return self.tokens_per_frame + self.actions_per_frame

    @property
    def action_token_id(self) -> int:
        return self.codebook_size
