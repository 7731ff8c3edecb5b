"""The result of `segue bench steps`, in the format of its JSON file, with its tables and the roofline plot (Williams et
al., 2009); and the bytes and operations of a step, counted from the shapes of a model's weights."""

from __future__ import annotations

from pathlib import Path

import msgspec
from accelerate import init_empty_weights

from segue.bench.harness.device import Ceilings, DeviceResult, device_page
from segue.bench.harness.report import Columns, drawn, table_of, versions
from segue.models.shared.library import AutoConfig, AutoModelForCausalLM


class Work(msgspec.Struct, kw_only=True):
    """The sizes of one model: numbers of weights, without the embedding table, of which one row is read per token."""

    dense: int
    """Weights that every token uses, without the head."""
    head: int
    experts: int
    """Weights of all experts of all layers."""
    share: float
    """Share of the experts that a token uses."""
    attention: int
    """Query heads times their width, over all layers."""
    cached: int
    """Numbers that the KV cache keeps per token."""
    itemsize: int
    """Bytes of a number."""

    def decode_bytes(self, batch: int, context: float) -> float:
        """Bytes read by a step of `batch` sequences with `context` tokens each. Counts the expected number of used
        experts if each token selects experts uniformly."""
        touched = self.experts * (1 - (1 - self.share) ** batch)
        return self.itemsize * (self.dense + self.head + touched + batch * context * self.cached)

    def decode_flops(self, batch: int, context: float) -> float:
        """Operations of the same step."""
        return batch * (2 * (self.dense + self.head + self.share * self.experts) + 4 * context * self.attention)

    def prefill_flops(self, tokens: int) -> float:
        """Operations of a prompt, of which only the last token goes through the head."""
        return 2 * tokens * (self.dense + self.share * self.experts) + 2 * self.head + 2 * tokens**2 * self.attention


def work_of(model_dir: Path, itemsize: int) -> Work:
    """The sizes of a decoder that has full attention in every layer."""
    config = AutoConfig.from_pretrained(model_dir)
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config)
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    matrices = [one for one in model.parameters() if one.ndim > 1 and one is not table and one is not head]
    experts = [one for one in matrices if one.ndim == 3]
    values = config.to_dict()
    width = values.get("head_dim") or config.hidden_size // config.num_attention_heads
    return Work(
        dense=sum(one.numel() for one in matrices if one.ndim == 2),
        head=head.numel(),
        experts=sum(one.numel() for one in experts),
        share=values["num_experts_per_tok"] / experts[0].shape[0] if experts else 0.0,
        attention=config.num_hidden_layers * config.num_attention_heads * width,
        cached=2 * config.num_hidden_layers * config.num_key_value_heads * width,
        itemsize=itemsize,
    )


class StepsSettings(msgspec.Struct, kw_only=True):
    """Settings of the run."""

    model: str
    device: str
    dtype: str
    prompt: int
    """Tokens before the measured decode steps."""
    output: int
    """Generated tokens of each sequence."""
    repeats: int
    seed: int


class Decode(msgspec.Struct):
    """Decode figures of one side for a number of sequences."""

    side: str
    batch: int
    step: float
    """Seconds of a decode step, the median of the repeats."""
    tokens_per_second: float
    """Output tokens of the whole load, prefill included: the best repeat."""
    bound: float
    """Seconds of the step at the ceilings."""
    intensity: float
    """Operations per byte that must be read."""
    flops: float
    """Achieved operations per second."""
    recorded: float | None = None
    """Share of the steps that were replayed from captured graphs, if the side has any."""


class Prefill(msgspec.Struct):
    """Prefill figures of one prompt on one side."""

    side: str
    tokens: int
    seconds: float
    """Seconds until its first token: the best repeat."""
    of_ceiling: float


class Profile(msgspec.Struct):
    """Decode steps of one side under the profiler, which slows the host down."""

    side: str
    batch: int
    step: float
    """Seconds of a step."""
    busy: float
    """Seconds of a step in which the device worked; the rest is the host's gap."""
    kernels: float
    """Kernels and copies of a step; on a CPU the operators called from Python."""
    longest: list[tuple[str, float, float]]
    """Those that took longest: (name, calls of a step, seconds of a step)."""


class StepsResult(DeviceResult, kw_only=True):
    benchmark: str = "steps"
    settings: StepsSettings
    ceilings: Ceilings
    work: Work
    decodes: list[Decode] = msgspec.field(default_factory=list)
    prefills: list[Prefill] = msgspec.field(default_factory=list)
    profiles: list[Profile] = msgspec.field(default_factory=list)


def markdown(result: StepsResult) -> str:
    """Title, ceilings, decode steps, prefill, and failures."""
    settings, can = result.settings, result.ceilings
    decodes: Columns[Decode] = {
        "side": lambda one: one.side,
        "sequences": lambda one: str(one.batch),
        "decode step (ms)": lambda one: f"{1e3 * one.step:.2f}",
        "bound (ms)": lambda one: f"{1e3 * one.bound:.2f}",
        "of bound": lambda one: f"{one.step / one.bound:.2f}×",
        "tokens/s": lambda one: f"{one.tokens_per_second:.0f}",
        "recorded": lambda one: "" if one.recorded is None else f"{one.recorded:.0%}",
    }
    prefills: Columns[Prefill] = {
        "side": lambda one: one.side,
        "prompt": lambda one: str(one.tokens),
        "prefill (ms)": lambda one: f"{1e3 * one.seconds:.1f}",
        "of the ceiling": lambda one: f"{one.of_ceiling:.0%}",
    }
    profiles: Columns[Profile] = {
        "profiled": lambda one: one.side,
        "sequences": lambda one: str(one.batch),
        "step (ms)": lambda one: f"{1e3 * one.step:.2f}",
        "device (ms)": lambda one: f"{1e3 * one.busy:.2f}",
        "kernels": lambda one: f"{one.kernels:.0f}",
        "longest": lambda one: ", ".join(f"{name[:40]} {1e3 * taken:.2f} ms" for name, _, taken in one.longest[:3]),
    }
    return device_page(
        result,
        f"{settings.model}, {settings.dtype}, {settings.device}",
        f"A copy moves {can.bytes_per_second / 1e12:.2f} TB/s, a matmul reaches {can.flops / 1e12:.1f} TFLOP/s. "
        f"{settings.prompt} tokens before the decode steps, {settings.output} tokens each; random weights; "
        f"{settings.repeats} repeats; {versions(result.machine.packages)}.",
        table_of(result.decodes, decodes),
        table_of(result.prefills, prefills),
        *([table_of(result.profiles, profiles)] if result.profiles else []),
    )


def plot(result: StepsResult, path: Path) -> None:
    """Operations per second over operations per byte, below the device's ceilings."""
    can = result.ceilings
    title = f"{result.settings.model}, decode steps, {result.settings.device}"
    with drawn(path, title, (7, 4.5)) as [[axes]]:
        intensities = [2.0**power for power in range(-2, 13)]
        roof = [min(can.flops, can.bytes_per_second * one) / 1e12 for one in intensities]
        axes.plot(intensities, roof, color="black", label="bound")
        for side in dict.fromkeys(one.side for one in result.decodes):
            mine = [one for one in result.decodes if one.side == side]
            axes.plot([one.intensity for one in mine], [one.flops / 1e12 for one in mine], marker="o", label=side)
            for one in mine:
                axes.annotate(str(one.batch), (one.intensity, one.flops / 1e12), fontsize=8)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("operations per byte read")
        axes.set_ylabel("TFLOP/s")
        axes.legend()
