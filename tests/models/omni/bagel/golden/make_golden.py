"""Record what the public reference of BAGEL makes of the tiny checkpoint: `golden.safetensors` and `golden.json` beside
this file.

The reference (github.com/ByteDance-Seed/Bagel, commit 056b5fd) pins its own transformers, so run it in an environment
of its own:

    python -m venv ENV && ENV/bin/pip install torch torchvision transformers==4.49.0 einops safetensors pillow tqdm
    segue tiny bagel TINY
    ENV/bin/python tests/models/omni/bagel/golden/make_golden.py BAGEL TINY

It computes in bfloat16 on a GPU, here in float32 on a CPU: a copy of its source names `float32` where it names
`bfloat16`, and `flash_attn` and `cv2` are modules made here, the former over torch's attention.

For each case of `cases.json` (`think`: the system prompt under which it thinks before it draws): an `answer` is
`NAME.ids`, and `NAME.logits` [`STEPS`, vocab] of its first steps; what is drawn is `NAME.velocities`
[evaluations, n, P], `NAME.latents` [n, P] and `NAME.pixels`, every `EVERY`th number of the decoded image before it is
clamped. A `story` has texts and images by turns: `NAME.ids.0`, `NAME.pixels.0`, and so on. `golden.json` has the
thoughts, the commit, and the SHA-256 of the weights.
"""

from __future__ import annotations

import copy
import hashlib
import json
import shutil
import sys
import tempfile
import types
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch.nn.functional import scaled_dot_product_attention

HERE = Path(__file__).parent
STEPS = 6
EVERY = 11
"""Prime to the sides of an image."""
THOUGHTS = 60
TEXTS = 40
"""Most tokens of each text of a story."""
WEIGHTS = ("ema.safetensors", "ae.safetensors")
LIMITS = ((128, 512, 16), (84, 224, 14))
"""Of the tiny checkpoint: longest side, shortest side and multiple, for the VAE and for the vision tower."""


def varlen(q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, causal: bool, **_: Any) -> torch.Tensor:
    """`flash_attn_varlen_func`: sequences side by side, [rows, heads, d]; the last query sees the last key."""
    out = torch.empty_like(q)
    groups = q.shape[1] // k.shape[1]
    for one in range(len(cu_seqlens_q) - 1):
        asked = slice(cu_seqlens_q[one], cu_seqlens_q[one + 1])
        seen = slice(cu_seqlens_k[one], cu_seqlens_k[one + 1])
        queries = q[asked].transpose(0, 1)
        keys, values = (of[seen].transpose(0, 1).repeat_interleave(groups, 0) for of in (k, v))
        mask = torch.ones(queries.shape[1], keys.shape[1], dtype=torch.bool)
        if causal:
            mask = mask.tril(keys.shape[1] - queries.shape[1])
        out[asked] = scaled_dot_product_attention(queries[None], keys[None], values[None], mask)[0].transpose(0, 1)
    return out


def prepare(reference: Path) -> None:
    """Make the reference importable, in float32."""
    place = Path(tempfile.mkdtemp()) / "bagel"
    shutil.copytree(reference, place, ignore=shutil.ignore_patterns(".git", "assets", "eval"))
    for path in place.rglob("*.py"):
        path.write_text(path.read_text().replace("torch.bfloat16", "torch.float32"))
    sys.path.insert(0, str(place))
    for name in ("flash_attn", "cv2"):
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__spec__ = ModuleSpec(name, None)  # transformers looks for it
    sys.modules["flash_attn"].flash_attn_varlen_func = varlen  # type: ignore[attr-defined]


def picture(width: int, height: int) -> Image.Image:
    """An image that is the same everywhere."""
    across, down = torch.arange(width), torch.arange(height)[:, None]
    channels = [(3 * across + down) % 256, (across + 5 * down) % 256, (across * down) % 256]
    return Image.fromarray(torch.stack(channels, -1).to(torch.uint8).numpy())


def load(tiny: Path) -> Any:
    """The reference's own entry point over the tiny checkpoint."""
    from data.data_utils import add_special_tokens
    from data.transforms import ImageTransform
    from inferencer import InterleaveInferencer
    from modeling.autoencoder import AutoEncoder, AutoEncoderParams
    from modeling.bagel import Bagel, BagelConfig, Qwen2Config, Qwen2ForCausalLM, SiglipVisionConfig, SiglipVisionModel
    from modeling.qwen2 import Qwen2Tokenizer

    llm = Qwen2Config.from_json_file(tiny / "llm_config.json")
    llm.qk_norm, llm.tie_word_embeddings, llm.layer_module = True, False, "Qwen2MoTDecoderLayer"
    vit = SiglipVisionConfig.from_json_file(tiny / "vit_config.json")
    vit.rope, vit.num_hidden_layers = False, vit.num_hidden_layers - 1
    own = json.loads((tiny / "config.json").read_text())["vae_config"]
    rest = {"resolution": 256, "in_channels": 3, "downsample": 8, "out_ch": 3}
    vae_config = AutoEncoderParams(**rest, **own, scale_factor=0.3611, shift_factor=0.1159)
    vae = AutoEncoder(vae_config)
    vae.load_state_dict(load_file(tiny / "ae.safetensors"))
    config = BagelConfig(
        llm_config=llm,
        vit_config=vit,
        vae_config=vae_config,
        vit_max_num_patch_per_side=vit.image_size // vit.patch_size,
        max_latent_size=LIMITS[0][0] // 16,
    )
    model = Bagel(Qwen2ForCausalLM(llm), SiglipVisionModel(vit), config)
    model.vit_model.vision_model.embeddings.convert_conv2d_to_linear(vit)
    tables = {name: tensor.clone() for name, tensor in model.state_dict().items() if name.endswith("pos_embed")}
    weights = load_file(tiny / "ema.safetensors")
    for name, table in tables.items():  # fixed when the reference makes them
        torch.testing.assert_close(weights[name], table)
    model.load_state_dict(weights)
    tokenizer, ids, added = add_special_tokens(Qwen2Tokenizer.from_pretrained(tiny))
    assert added == 0
    transforms = (ImageTransform(*limits) for limits in LIMITS)
    return InterleaveInferencer(model.eval(), vae.eval(), tokenizer, *transforms, ids)


def run(reference: Any, name: str, case: dict[str, Any]) -> tuple[dict[str, torch.Tensor], str | None]:
    """(tensors of one case, its thoughts)."""
    model, seen = reference.model, {"logits": [], "velocities": [], "latents": [], "pixels": [], "ids": []}

    def note(owner: Any, method: str, kind: str) -> None:
        call = getattr(owner, method)

        def noted(*args: Any, **kwargs: Any) -> Any:
            made = call(*args, **kwargs)
            seen[kind].append(made)
            return made

        setattr(owner, method, noted)

    methods = ((model, "_forward_flow", "velocities"), (model, "generate_image", "latents"))
    methods += ((model, "generate_text", "ids"), (reference.vae_model, "decode", "pixels"))
    hook = model.language_model.lm_head.register_forward_hook(lambda module, given, out: seen["logits"].append(out))
    for owner, method, kind in methods:
        note(owner, method, kind)
    given = ([picture(*case["image"])] if "image" in case else []) + [case["text"]]
    guidance, settings = case.get("guidance"), {}
    if guidance is not None:
        torch.manual_seed(case["seed"])
        settings = {
            "cfg_text_scale": guidance["text"],
            "cfg_img_scale": guidance["image"],
            "cfg_interval": (guidance["above"], guidance["upto"]),
            "cfg_renorm_type": guidance["renorm"],
            "cfg_renorm_min": guidance["least"],
            "num_timesteps": case["steps"],
            "timestep_shift": 3.0,
        }
    if "size" in case:
        settings["image_shapes"] = tuple(case["size"])
    try:
        answer, think = case["task"] == "answer", "think" in case
        if case["task"] == "story":
            return tell(reference, name, case, settings, seen), None
        if think:
            sys.modules["inferencer"].GEN_THINK_SYSTEM_PROMPT = case["think"]  # type: ignore[attr-defined]
        made = reference.interleave_inference(
            given, think=think, understanding_output=answer, max_think_token_n=THOUGHTS, **settings
        )
    finally:
        hook.remove()
        for owner, method, _ in methods:
            delattr(owner, method)
    tensors = {}
    if answer:
        tensors["ids"] = seen["ids"][0][:, 0].to(torch.int16)
        tensors["logits"] = torch.cat(seen["logits"])[:STEPS]
    else:
        tensors["velocities"] = torch.stack(seen["velocities"])
        tensors["latents"] = seen["latents"][0][0]
        tensors["pixels"] = seen["pixels"][0].flatten()[::EVERY]
    stds = {key: round(float(tensor.float().std()), 3) for key, tensor in tensors.items()}
    sys.stdout.write(f"{name}: {made[0]!r}, std {stds}\n")
    return {f"{name}.{key}": tensor.contiguous() for key, tensor in tensors.items()}, made[0] if think else None


def tell(
    reference: Any, name: str, case: dict[str, Any], settings: dict[str, Any], seen: dict[str, list[Any]]
) -> dict[str, torch.Tensor]:
    """Tensors of texts and images by turns. The reference itself ends after an image; here its own steps go on: the
    context takes the text, then the image as one that is given, at the size and with the levels of its file."""
    made: dict[str, torch.Tensor] = {}
    whole, without_image = reference.init_gen_context(), reference.init_gen_context()
    without_text = copy.deepcopy(whole)
    whole = reference.update_context_text(case["text"], whole)
    without_image = reference.update_context_text(case["text"], without_image)
    shape = settings.pop("image_shapes")
    for number in range(case["images"] + 1):
        text = reference.gen_text(whole, do_sample=False, max_length=TEXTS)
        made[f"{name}.ids.{number}"] = seen["ids"][number][:, 0].to(torch.int16)
        if number == case["images"]:
            sys.stdout.write(f"{name}: {text!r}\n")
            return made
        whole = reference.update_context_text(text, whole)
        for noted in ("velocities", "latents", "pixels"):
            seen[noted].clear()
        reference.gen_image(
            shape, whole, cfg_text_precontext=without_text, cfg_img_precontext=without_image, **settings
        )
        without_image = reference.update_context_text(text, without_image)
        pixels = seen["pixels"][0]
        made[f"{name}.velocities.{number}"] = torch.stack(seen["velocities"])
        made[f"{name}.pixels.{number}"] = pixels.flatten()[::EVERY].clone()
        levels = ((pixels[0] / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8)
        image = Image.fromarray(levels.permute(1, 2, 0).numpy())
        whole = reference.update_context_image(reference.vae_transform.resize_transform(image), whole)
        without_text = copy.deepcopy(whole)
    raise AssertionError


def main(reference: Path, tiny: Path) -> None:
    torch.set_num_threads(1)
    prepare(reference)
    inferencer = load(tiny)
    cases: dict[str, dict[str, Any]] = json.loads((HERE / "cases.json").read_text())
    tensors: dict[str, torch.Tensor] = {}
    thoughts: dict[str, str] = {}
    for name, case in cases.items():
        made, thought = run(inferencer, name, case)
        tensors |= made
        if thought is not None:
            thoughts[name] = thought
    save_file(tensors, HERE / "golden.safetensors")
    digests = {name: hashlib.sha256((tiny / name).read_bytes()).hexdigest() for name in WEIGHTS}
    record = {"commit": "056b5fd", "checkpoint": digests, "thoughts": thoughts}
    (HERE / "golden.json").write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
