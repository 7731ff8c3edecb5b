"""Teach a small pipeline in FLUX.2 Klein's published layout to draw the scenes of `captions.py` and to edit them."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from demo_model.data.captions import random_caption, random_edit
from demo_model.data.prompts import tokenizer
from demo_model.data.scenes import SIDE, Canvas, clean, painted
from demo_model.data.texts import SHORT, Prompted, Prompts
from demo_model.pixels import STEPS
from demo_model.training.muon import inside
from demo_model.training.steps import Part, moved
from demo_model.training.words import words_part
from segue.models.shared.diffusion.library import LIBRARIES, AutoConfig
from segue.models.shared.tiny.files import write_json

LAYERS = (9, 18, 27)
"""Of the text encoder: whose hidden states the pipeline takes."""
TRAINED = (0, 1, 9, 10, 18, 19)
"""Of the text encoder's layers: all that change their input. Training runs no others."""
INEXACT = 0.4
"""Noise of the latents from which the decoder learns, at most, relative to their own deviation."""
SHIFT = 2.0
"""Of the levels of noise: the pipeline takes more steps where there is much."""
LEAST = 0.1
"""The least level of noise that the denoiser is trained at, before the shift; a pipeline ends with 1 / STEPS."""
_WIDTH, _LATENTS = 64, 16
TEXT: dict[str, Any] = {
    "hidden_size": _WIDTH,
    "intermediate_size": 2 * _WIDTH,
    "num_hidden_layers": max(LAYERS),
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "initializer_range": 0.1,
    "tie_word_embeddings": True,
}
TRANSFORMER: dict[str, Any] = {
    "in_channels": 4 * _LATENTS,
    "num_layers": 2,
    "num_single_layers": 4,
    "attention_head_dim": 32,
    "num_attention_heads": 8,
    "joint_attention_dim": len(LAYERS) * _WIDTH,
    "timestep_guidance_channels": 128,
    "mlp_ratio": 2.0,
    "axes_dims_rope": (8, 8, 8, 8),
    "guidance_embeds": False,
}
VAE: dict[str, Any] = {
    "block_out_channels": (16, 32, 48, 64),
    "layers_per_block": 1,
    "latent_channels": _LATENTS,
    "norm_num_groups": 8,
    "sample_size": 4 * SIDE,
}
_LIBRARY: Any = LIBRARIES["diffusers"]
PARTS: dict[str, Any] = {
    "text_encoder": LIBRARIES["transformers"].Qwen3ForCausalLM,
    "transformer": _LIBRARY.Flux2Transformer2DModel,
    "vae": _LIBRARY.AutoencoderKLFlux2,
}


def create(directory: Path) -> None:
    """Write everything but the weights."""
    from demo_model.data.questions import sentences
    from segue.models.images.flux2.tiny import KLEIN_PARTS
    from segue.models.omni.qwen3_omni.tiny.config import ROLES
    from segue.models.shared.diffusion.tiny import QWEN_SPECIAL, QWEN_TEMPLATE, write_index
    from segue.models.shared.tiny.qwen import write_qwen_tokenizer

    rng = random.Random(0)
    texts = [str(random_caption(rng)) for _ in range(2000)] + [random_edit(rng).text for _ in range(2000)]
    (directory / "tokenizer").mkdir(parents=True, exist_ok=True)
    special = (*QWEN_SPECIAL, "<think>", "</think>")
    texts = [*texts, *sentences()]
    words = write_qwen_tokenizer(directory / "tokenizer", special, ROLES, texts=texts, chat_template=QWEN_TEMPLATE)
    ids = words.get_vocab()
    ends = {"bos_token_id": ids["<|endoftext|>"], "eos_token_id": ids["<|im_end|>"]}
    text = AutoConfig.for_model("qwen3", vocab_size=len(ids), pad_token_id=ids["<|endoftext|>"], **ends, **TEXT)
    text.architectures = ["Qwen3ForCausalLM"]
    text.save_pretrained(directory / "text_encoder")
    with torch.device("meta"):
        for name, settings in (("transformer", TRANSFORMER), ("vae", VAE)):
            PARTS[name](**settings).save_config(directory / name)
    _LIBRARY.FlowMatchEulerDiscreteScheduler(shift=SHIFT).save_pretrained(directory / "scheduler")
    write_index(directory, "Flux2KleinPipeline", KLEIN_PARTS, is_distilled=True)


def networks(directory: Path, seed: int = 0) -> nn.ModuleDict:
    """The pipeline's networks, float32, with the weights that lie there or random ones. The text encoder has the layers
    `TRAINED` alone."""
    torch.manual_seed(seed)
    made = nn.ModuleDict()
    for name, kind in PARTS.items():
        if any((directory / name).glob("*.safetensors")):
            made[name] = kind.from_pretrained(directory / name, dtype=torch.float32)
        elif name == "text_encoder":
            made[name] = kind(AutoConfig.from_pretrained(directory / name))
        else:
            made[name] = kind.from_config(kind.load_config(directory / name))
            for part, module in made[name].named_modules():
                if isinstance(module, nn.Linear) and ("modulation" in part or part in ("norm_out.linear", "proj_out")):
                    nn.init.zeros_(module.weight)  # all blocks begin as the identity
    made["text_encoder"] = _with_layers(made["text_encoder"], TRAINED)
    return made.train()


def _with_layers(text: Any, chosen: Sequence[int | None]) -> Any:
    """A text encoder with copies of these layers of another; None: one that adds nothing to its input."""
    config = deepcopy(text.config)
    config.num_hidden_layers, config.layer_types = len(chosen), config.layer_types[:1] * len(chosen)
    made = PARTS["text_encoder"](config)
    for layer, index in zip(made.model.layers, chosen, strict=True):
        if index is None:
            for weights in (one for name, one in layer.named_parameters() if "proj" in name):
                nn.init.zeros_(weights)
        else:
            layer.load_state_dict(text.model.layers[index].state_dict())
    made.model.embed_tokens.load_state_dict(text.model.embed_tokens.state_dict())
    made.model.norm.load_state_dict(text.model.norm.state_dict())
    return made


def write(directory: Path, trained: nn.ModuleDict) -> None:
    """Write the weights, bfloat16."""
    for name, network in trained.items():
        depth = [TRAINED.index(index) if index in TRAINED else None for index in range(max(LAYERS))]
        whole = _with_layers(network, depth) if name == "text_encoder" else deepcopy(network)
        whole.to("cpu", torch.bfloat16).save_pretrained(directory / name, max_shard_size="15MB")
        config = json.loads((directory / name / "config.json").read_text())
        config.pop("_name_or_path", None)  # where this machine has read it
        write_json(directory / name, "config.json", config)


# what is learned


def vae_part(made: nn.ModuleDict, directory: Path, *, size: int = 32) -> Part:
    """Trains the VAE to give pictures back without their noise; what has colour counts more."""

    def loss(batch: Prompts, step: int) -> tuple[Tensor, dict[str, Tensor]]:
        wanted = _scaled(clean(batch.after))
        spread = made["vae"].encode(_seen(batch.after)).latent_dist
        decoded = made["vae"].decode(spread.mean + spread.std * torch.randn_like(spread.mean)).sample
        kl = (spread.mean.square() + spread.var - 1 - spread.logvar).mean() / 2
        return _unlike(decoded, wanted) + 1e-4 * kl, {"away": (decoded - wanted).abs().mean(), "kl": kl}

    batches, matrices = Prompted(directory, size, SHORT), _matrices(made["vae"])
    return Part("vae", [made["vae"]], batches, loss, matrices=matrices, matrix_rate=0.005)


def decoder_part(made: nn.ModuleDict, directory: Path, *, size: int = 32) -> Part:
    """Trains the VAE's decoder further, to make clean shapes of latents that are not exact: the denoiser's."""
    vae = made["vae"]

    def loss(batch: Prompts, step: int) -> tuple[Tensor, dict[str, Tensor]]:
        wanted = _scaled(clean(batch.after))
        with torch.no_grad():
            latents = vae.encode(wanted).latent_dist.mode()
            spread = torch.rand(len(latents), 1, 1, 1, device=latents.device) * INEXACT
            latents = latents + spread * latents.std((0, 2, 3), keepdim=True) * torch.randn_like(latents)
        decoded = vae.decode(latents).sample
        return _unlike(decoded, wanted), {"away": (decoded - wanted).abs().mean()}

    modules, batches = [vae.decoder, vae.post_quant_conv], Prompted(directory, size, SHORT)
    return Part("decoder", modules, batches, loss, matrices=_matrices(vae.decoder), matrix_rate=0.003)


def _matrices(module: nn.Module) -> list[nn.Parameter]:
    return [one for one in module.parameters() if one.ndim > 1 and min(one.shape[:2]) > 3]


def _unlike(decoded: Tensor, wanted: Tensor) -> Tensor:
    """How far pictures are from what they should be: pixels, of which those with colour count more, and edges."""
    weight = 1 + 4 * _chroma(wanted)
    edges = [(decoded.diff(dim=axis) - wanted.diff(dim=axis)).abs().mean() for axis in (2, 3)]
    return (weight * (decoded - wanted).abs()).mean() + edges[0] + edges[1]


def reading_part(made: nn.ModuleDict, directory: Path, *, size: int = 512) -> Part:
    """Trains the text encoder."""
    text = made["text_encoder"]
    return words_part(partial(_read, text), text, len(LAYERS) * _WIDTH, tokenizer(directory / "tokenizer"), size)


def flow_part(made: nn.ModuleDict, directory: Path, *, size: int = 64) -> Part:
    """Trains the denoiser: the velocity from pictures to noise, at levels of noise that are as frequent as in a
    pipeline's steps. The first step sees nothing but noise, and only there what is told by all of a picture, as its
    background, must be taken from the words. What has colour counts more, and what an edit changes most.

    An edit has one right result, and what becomes of it is decided in the first step: at least half of its levels are
    that. The others lie between the noise and where the network itself leads from it, and it learns to go on from there
    to what is right. Between noise and the right picture it would learn to believe what it sees rather than what is
    asked and given, and keep the mistakes of its first step (scheduled sampling: Bengio et al. 2015)."""
    text, transformer, vae = made["text_encoder"], made["transformer"], made["vae"]

    def loss(batch: Prompts, step: int) -> tuple[Tensor, dict[str, Tensor]]:
        with torch.no_grad():
            drawn = _scaled(clean(batch.after))
            wanted, words = tokens(vae, drawn), _read(text, batch.ids, batch.mask)
            weight, given = 1 + 3 * _where(_chroma(drawn)), []
            if batch.before is not None:
                weight = weight + 8 * _where((drawn - _scaled(clean(batch.before))).abs())
                given = [tokens(vae, _seen(batch.before))]
        count, device = len(wanted), wanted.device
        txt_ids = functional.pad(torch.arange(words.shape[1], device=device)[:, None], (3, 0))
        img_ids = _places(wanted.shape[1], 1 + len(given), device)

        def leads(seen: Tensor, level: Tensor) -> tuple[Tensor, Tensor]:
            """To which picture, and its squared distance from the one that is wanted, divided by the level."""
            [velocity] = transformer(
                hidden_states=torch.cat([seen, *given], 1),
                encoder_hidden_states=words,
                timestep=level,
                img_ids=img_ids,
                txt_ids=txt_ids,
                return_dict=False,
            )
            found = seen - level[:, None, None] * velocity[:, : wanted.shape[1]]
            away = (found - wanted).square().mean(-1) / level[:, None]
            return found.detach(), (weight * away).sum() / weight.sum()

        noise, aim, losses = torch.randn_like(wanted), wanted, {}
        if given:
            aim, losses["edits"] = leads(noise, torch.ones(count, device=device))
        spread = (torch.rand(count, device=device) + torch.arange(count, device=device)) / count
        level = _shifted((LEAST + (1 - LEAST) * spread * (STEPS + 1) / STEPS).clamp(max=1))
        _, losses["later" if given else "draws"] = leads(torch.lerp(aim, noise, level[:, None, None]), level)
        return torch.stack([*losses.values()]).mean(), losses

    batches = Prompted(directory, size)
    [matrices, _] = inside(transformer.transformer_blocks, transformer.single_transformer_blocks)
    return Part("flow", [transformer], batches, loss, matrices=matrices, matrix_rate=0.006)


def _shifted(levels: Tensor) -> Tensor:
    """As the pipeline's scheduler shifts them."""
    return SHIFT * levels / (1 + (SHIFT - 1) * levels)


def _where(strength: Tensor) -> Tensor:
    """[B, any, SIDE, SIDE] → [B, tokens]: 1 where something of a token's pixels is strong, else 0."""
    return (functional.max_pool2d(strength.amax(1, keepdim=True), SIDE // 8) > 0.6).float().flatten(1)


def _chroma(pictures: Tensor) -> Tensor:
    """[B, 3, SIDE, SIDE] → [B, 1, SIDE, SIDE]: how far from grey."""
    return pictures.amax(1, keepdim=True) - pictures.amin(1, keepdim=True)


def _scaled(pictures: Tensor) -> Tensor:
    """[B, SIDE, SIDE, 3], 0 to 255 → [B, 3, SIDE, SIDE], -1 to 1."""
    return pictures.permute(0, 3, 1, 2) / 127.5 - 1


def _seen(drawn: Canvas) -> Tensor:
    """[B, 3, SIDE, SIDE]: pictures with their noise, as a pipeline takes them."""
    return _scaled(painted(drawn).float())


def _read(text: Any, ids: Tensor, mask: Tensor) -> Tensor:
    """[B, tokens, features]: what the pipeline takes of a text encoder that has the layers `TRAINED` alone."""
    before = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=ids.device).tril()
    # the library asks the device about a mask of two dimensions, and waits for the answer
    visible = (before & mask[:, None])[:, None]
    states = text.model(input_ids=ids, attention_mask=visible, use_cache=False, output_hidden_states=True).hidden_states
    return torch.cat([states[sum(index < layer for index in TRAINED)] for layer in LAYERS], -1)


def tokens(vae: Any, pictures: Tensor) -> Tensor:
    """[B, tokens, features]: latents as the denoiser sees them, two by two, normalised."""
    latents = functional.pixel_unshuffle(vae.encode(pictures).latent_dist.mode().float(), 2)
    mean, std = vae.bn.running_mean, torch.sqrt(vae.bn.running_var + vae.config.batch_norm_eps)
    return (latents.flatten(2).mT - mean) / std


def _places(count: int, pictures: int, device: torch.device) -> Tensor:
    """int64 [pictures · count, 4]: picture, row, column and 0 of each token."""
    side, which = torch.arange(math.isqrt(count), device=device), torch.arange(pictures, device=device)
    return torch.cartesian_prod(10 * which, side, side, torch.zeros(1, dtype=torch.long, device=device))


@torch.no_grad()
def measure(made: nn.ModuleDict, directory: Path) -> None:
    """Set the statistics by which latents are normalised."""
    vae, batches = made["vae"], Prompted(directory, 32, SHORT)
    seen = []
    for step in range(4):
        pictures = _scaled(clean(moved(batches(step).after, vae.device)))
        seen.append(functional.pixel_unshuffle(vae.encode(pictures).latent_dist.mode(), 2))
    features = torch.cat(seen).transpose(0, 1).flatten(1)
    vae.bn.running_mean.copy_(features.mean(1))
    vae.bn.running_var.copy_(features.var(1))
