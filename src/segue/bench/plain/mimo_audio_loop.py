"""The plain loop of MiMo-Audio: one request, row by row, with keys and values kept; then all frames to samples in one
call. `python -m segue.bench.plain.mimo_audio_loop FD OPTIONS` is its process.

A row is a text token and the codes of a patch. G frames of a patch, K codes of a frame, H hidden size.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from segue.bench.plain.comparison import Made, serve
from segue.bench.plain.mimo_audio import WORKLOAD
from segue.engines.contract import LoadContext
from segue.messages.request import Request
from segue.models.shared.library import DynamicCache
from segue.models.speech.mimo_audio.config import read_codec, read_config
from segue.models.speech.mimo_audio.input import InputProcessor
from segue.models.speech.mimo_audio.loading import load_decoder, load_encoder, load_language_model
from segue.models.speech.mimo_audio.tokens import EMPTY, id_of, tokenizer_of


class MimoAudio:
    """`Loop`."""

    ceiling = 0.0

    def __init__(self, ctx: LoadContext) -> None:
        self.device = ctx.device
        self.config = read_config(ctx.model_dir)
        self.codec = read_codec(ctx.model_dir, self.config)
        self.input = InputProcessor(ctx)
        self.net = load_language_model(ctx, self.config)
        self.encoder = load_encoder(ctx, self.codec, self.config)
        self.decoder = load_decoder(ctx, self.codec, self.config)
        self.empty = id_of(tokenizer_of(ctx.model_dir, self.config), EMPTY)

    @torch.inference_mode()
    def __call__(self, request: Request, tokens: int) -> Made:
        cache, given = DynamicCache(), self._prompt(request)
        ids: list[int] = []
        patches: list[Tensor] = []
        while len(ids) < tokens:
            out = self.net.decoder.model(inputs_embeds=given[None], past_key_values=cache, use_cache=True)
            hidden = out.last_hidden_state[0, -1]
            ids.append(int(self.net.decoder.lm_head(hidden).argmax()))
            if ids[-1] == self.empty:
                patches.append(self._patch(hidden))
                given = self.net.encode(patches[-1][None])
            else:
                given = self.net.decoder.model.embed_tokens(torch.tensor(ids[-1:], device=self.device))
        if "audio" not in request.modalities or not patches:
            return Made(token_ids=ids)
        samples = self.decoder(torch.cat(patches)[None])[0].cpu()
        return Made(token_ids=ids, audio_seconds=len(samples) / self.codec.sampling_rate)

    def _prompt(self, request: Request) -> Tensor:
        """[T, H]: text, and the patches of recordings in their places."""
        payload = self.input.process(request)
        ids = payload["token_ids"].to(self.device)
        rows: Tensor = self.net.decoder.model.embed_tokens(ids)
        codes = [self._whole_patches(self.encoder(item["samples"].to(self.device))) for item in payload["media"]]
        if codes:
            rows[ids == self.empty] = self.net.encode(torch.cat(codes))
        return rows

    def _whole_patches(self, codes_nK: Tensor) -> Tensor:
        """[n, K] → [patches, G, K]; the last frame is repeated."""
        missing = -len(codes_nK) % self.config.group_size
        return torch.cat([codes_nK, codes_nK[-1:].expand(missing, -1)]).unflatten(0, (-1, self.config.group_size))

    def _patch(self, hidden: Tensor) -> Tensor:
        """[H] → the codes of a patch [G, K]: channel k is `delays[k]` steps behind."""
        net, config = self.net, self.config
        codes = torch.zeros(config.group_size, config.audio_channels, dtype=torch.long, device=self.device)
        cache, given = DynamicCache(), net.hidden_states_downcast(hidden)
        for step in range(config.group_size + max(config.delays)):
            out = net.local_transformer(inputs_embeds=given[None, None], past_key_values=cache, use_cache=True)
            given = torch.zeros_like(given)
            for channel, delay in enumerate(config.delays):
                if 0 <= step - delay < config.group_size:
                    logits = net.local_transformer_lm_heads[channel](out.last_hidden_state[0, -1])
                    logits[config.empty_codes[channel]] = -torch.inf
                    code = codes[step - delay, channel] = logits.argmax()
                    given = given + net.speech_embeddings_to_local(net.speech_embeddings[channel](code))
        return codes


if __name__ == "__main__":
    sys.exit(serve(sys.argv[1:], WORKLOAD.kinds, MimoAudio))
