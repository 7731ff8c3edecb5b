"""The action-conditioned video model."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn
from transformers import GenerationMixin, LlamaModel, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast

from action_video.configuration import ActionVideoConfig
from action_video.image_tokenizer import ImageTokenizer


class ActionVideoForGeneration(PreTrainedModel, GenerationMixin):
    """Codes of a frame, actions, codes of the next frame, and so on."""

    config_class = ActionVideoConfig
    base_model_prefix = "trunk"
    _no_split_modules: ClassVar = ["LlamaDecoderLayer"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_attention_backend = True

    def __init__(self, config: ActionVideoConfig) -> None:
        super().__init__(config)
        width = config.trunk.hidden_size
        self.image_tokenizer = ImageTokenizer(config)
        self.trunk = LlamaModel(config.trunk)
        self.action_projection = nn.Linear(config.action_size, width)
        self.space = nn.Embedding(config.tokens_per_step, width)
        """Where in a frame, or which of the actions after it."""
        self.time = nn.Embedding(config.max_frames, width)
        self.head = nn.Linear(width, config.codebook_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.trunk.embed_tokens

    def embed(self, input_ids: torch.Tensor, actions: torch.Tensor | None, start: int) -> torch.Tensor:
        """`input_ids` [b, t], the first at position `start`; `actions` [b, n, 3], of which the last belong to the
        action tokens among them → [b, t, width]."""
        rows = self.trunk.embed_tokens(input_ids)
        are_actions = input_ids == self.config.action_token_id
        count = int(are_actions[0].sum())
        if count:
            projected = self.action_projection(actions[:, -count:].to(rows.dtype))
            rows = rows.masked_scatter(are_actions[..., None], projected)
        place = torch.arange(start, start + input_ids.shape[1], device=input_ids.device)
        step = self.config.tokens_per_step
        return rows + self.space(place % step) + self.time(place // step)

    def forward(
        self,
        input_ids: torch.LongTensor,
        actions: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        start = past_key_values.get_seq_length() if past_key_values is not None else 0
        outputs = self.trunk(
            inputs_embeds=self.embed(input_ids, actions, start),
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            use_cache=use_cache,
        )
        logits = self.head(outputs.last_hidden_state[:, -logits_to_keep:])
        return CausalLMOutputWithPast(logits=logits, past_key_values=outputs.past_key_values)

    @torch.inference_mode()
    def imagine(self, pixels: torch.Tensor, actions: torch.Tensor, **sampling: Any) -> torch.Tensor:
        """The frames that follow.

        `pixels`: [b, f, 3, height, width] in [-1, 1], the frames so far. `actions`: [b, n, 6, 3], those after each
        frame, n at least f. Returns the n - f + 1 new frames. `sampling`: arguments of `generate`.
        """
        batch, given = pixels.shape[:2]
        codes = self.image_tokenizer.encode(pixels.flatten(0, 1)).unflatten(0, (batch, given))
        codes = self.imagine_codes(codes, actions, **sampling)
        return self.image_tokenizer.decode(codes.flatten(0, 1)).unflatten(0, (batch, -1))

    @torch.inference_mode()
    def imagine_codes(self, codes: torch.LongTensor, actions: torch.Tensor, **sampling: Any) -> torch.LongTensor:
        """The same with frames of codes [b, f, tokens] → [b, n - f + 1, tokens]."""
        batch, given, tokens = codes.shape
        marks = codes.new_full((batch, self.config.actions_per_frame), self.config.action_token_id)
        sequence = torch.cat([part for frame in codes.unbind(1) for part in (frame, marks)], dim=1)
        cache = DynamicCache(config=self.config.trunk)
        made = []
        for step in range(given, actions.shape[1] + 1):
            sequence = self.generate(
                sequence,
                actions=actions[:, :step].flatten(1, 2),
                attention_mask=torch.ones_like(sequence),
                past_key_values=cache,
                max_new_tokens=tokens,
                **{"do_sample": False, **sampling},
            )
            made.append(sequence[:, -tokens:])
            sequence = torch.cat([sequence, marks], dim=1)
        return torch.stack(made, dim=1)
