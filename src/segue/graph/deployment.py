"""The deployment: where and how each stage of a graph runs. `segue.graph.loader.load_plan` lays one over a graph.

The file is YAML; every key is optional, and so is the file. `null` means "worked out by itself". Sizes are bytes, or
text such as `64MiB` and `1GB`.

    defaults: {dtype: bfloat16}           # any key of a stage, for every stage but `input`
    stages:
      thinker:
        devices: [cuda:0]                 # auto, cpu, cuda:N, or a list; replica i runs on entry i, round and round
        replicas: 1                       # by default one per device
        memory_share: 0.5                 # of its device, per replica: weights, cache and activations together
        dtype: bfloat16                   # auto (float32 on a CPU, else bfloat16), float32, bfloat16, float16
        threads: 2                        # CPU threads of its worker
        max_batch: 64                     # requests (autoregressive), rows (diffusion) or work items (module) per step
        load_format: auto                 # auto, dummy (random weights of the right shape)
        fuse_with: null                   # share a worker with this stage; null: not even where the model suggests it
        options: {look_ahead: 2}          # the family's own
        # autoregressive stages only:
        max_tokens_per_step: 2048
        prefill_chunk: 256                # of them, prompt tokens in a step in which others decode
        max_model_len: null
        block_size: 16                    # tokens per block of the KV cache
        kv_blocks: null                   # null: what memory_share holds
        prefix_caching: true
        prefix_states: null               # states of prompts' beginnings; null: as many as max_batch
        deterministic: false              # the same logits to the bit whatever the batch
        max_logprobs: 20                  # most tokens a request may ask logprobs of in one place; -1: any number
        attention: auto                   # auto, torch, cpu, triton, flex, flashinfer, flash_attn
        enforce_eager: false              # true: no CUDA graphs
        compile: false                    # torch.compile for the layers of the decoder (of the denoiser: its blocks)
        tensor_parallel: 1                # processes per replica, each with a part of the weights
        quantization: none                # bfloat16 (on a CPU), int8, int4, fp8: what weights are made into when loaded
        kv_dtype: auto                    # fp8: keys and values in 8 bits
        lora: {adapters: {poet: /srv/poet}, max_rank: 64, max_adapters: 16}   # {} or more: the stage takes adapters
        scheduling: priority              # priority (then arrival), fcfs (arrival), fair (equal shares between tenants)
        speculation: {method: ngram, tokens: 4}     # or draft, eagle, medusa with a model; or mtp
        sampling: {temperature: 0.7}      # before the family's own defaults, after the request's
    edges:
      - {from: thinker, to: talker, connector: shm, budget: 64MiB}     # budget: bytes sent and not yet consumed
    runtime:
      connectors:
        shm: {name: SharedMemoryConnector, extra: {shm_threshold_bytes: 65536, pool_bytes: 64MiB, max_bytes: 512MiB}}
    limits: {max_waiting: 2048, max_retries: 2, default_deadline: null, retained_bytes: 256MiB, drain_seconds: 10,
             hang_seconds: 600}

Of these, diffusion stages have `compile`, `quantization` and `attention` (auto, native, cudnn, flash, flash_3, sage,
xformers), `gguf: model.gguf` (weights from that file), `offload: layerwise` (they wait in the host's memory), and
three ways to have several processes per replica, which multiply: `cfg_parallel: 2` (guidance branches),
`sequence_parallel: 2` (tokens; with `sequence_mode: ulysses`, `ring`, or `{ulysses: 2, ring: 2}`) and
`tensor_parallel: 2` (weights).

`limits` has the keys of `Limits`; `defaults` do not reach `input`, which runs on the CPU. Stages fused into one worker
are joined by the in-process connector; every other edge gets shared memory by itself: the connector called `shm`, or
the only SharedMemoryConnector the file defines.

What vllm-omni's connector documentation writes is understood as well: `connectors` beside or under `runtime`, and a
list of stages, called `stages` or `stage_args`:

    stage_args:
      - {stage_id: 0, output_connectors: {to_stage_1: connector_of_shared_memory}}
      - {stage_id: 1, input_connectors: {from_stage_0: connector_of_shared_memory}}

A stage is named by `stage_name`, or counted by `stage_id`: its place, from 0, in the topological order of the graph
without `input` (`segue graph MODEL` prints them in this order). `to_stage_` and `from_stage_` take names or numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from segue.graph.lora import LoraPlan
from segue.graph.speculation import SpeculationPlan
from segue.graph.stage_graph import StageGraph
from segue.messages.sampling import SamplingParams

MiB = 1 << 20

ConnectorKind = Literal["inproc", "shm"]
ATTENTIONS = ("auto", "torch", "cpu", "triton", "flex", "flashinfer", "flash_attn")
DIFFUSION_ATTENTIONS = ("auto", "native", "cudnn", "flash", "flash_3", "sage", "xformers")
"""What computes attention in a denoiser: diffusers' dispatch; all but `native` on a GPU, where they are installed."""
OFFLOADS = ("none", "layerwise")
"""Where the weights of a denoiser wait for their turn: on its device, or in the memory of the host."""
SEQUENCE_MODES = ("ulysses", "ring")
"""What the ranks of a sequence parallel denoiser exchange in attention: tokens for heads, or keys and values. Each may
be said with a number."""
SCHEDULINGS = ("priority", "fcfs", "fair")
"""Who runs first in an autoregressive stage."""
QUANTIZATIONS = ("none", "bfloat16", "int8", "int4", "fp8")
"""What the weights of a stage's linear layers are made into when it loads."""
KV_DTYPES = ("auto", "fp8")
"""What keys and values are stored in; `auto`: what they are computed in."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """What a machine has to give. Memory in bytes."""

    cpus: int
    """Cores this process may use."""
    memory_bytes: int
    gpus: tuple[int, ...] = ()
    """Memory of each GPU; entry i is `cuda:i`."""


@dataclass(frozen=True, slots=True)
class StagePlan:
    """One stage, resolved: nothing is left to work out but what only its weights can say."""

    name: str
    engine: str
    """`autoregressive`, `diffusion` or `module`."""
    devices: tuple[str, ...]
    """`cpu` or `cuda:N`; all of one kind."""
    replicas: int
    memory_share: float
    """Of its device, per replica; 0 where the stage keeps nothing that must be sized."""
    memory_bytes: int
    """`memory_share` in bytes; 0 where the device's memory is not known until a worker runs there."""
    dtype: str
    """`float32`, `bfloat16` or `float16`."""
    threads: int
    """CPU threads of the worker; equal for fused stages."""
    max_batch: int
    load_format: str = "auto"
    """`auto` or `dummy`."""
    options: dict[str, Any] = field(default_factory=dict)
    max_tokens_per_step: int = 2048
    prefill_chunk: int | None = None
    """None: what `max_tokens_per_step` leaves."""
    max_model_len: int | None = None
    block_size: int = 16
    kv_blocks: int | None = None
    """None: what `memory_bytes` holds."""
    prefix_caching: bool = True
    prefix_states: int | None = None
    """Of a model that keeps states: how many of prompts' beginnings are kept; None: `max_batch`, or what fits."""
    deterministic: bool = False
    """The same logits to the bit whatever the batch."""
    max_logprobs: int = 20
    """Most tokens whose log-probabilities a request may ask for in one place; -1: any number."""
    scheduling: str = "priority"
    """`priority`, `fcfs` or `fair`."""
    attention: str = "auto"
    enforce_eager: bool = False
    compile: bool = False
    tensor_parallel: int = 1
    """Processes of each replica, with a part of the weights each."""
    cfg_parallel: int = 1
    """Of a diffusion stage: processes of each replica, among which the guidance branches are divided."""
    sequence_parallel: int = 1
    """Of a diffusion stage: processes of each replica, among which the tokens of each row are divided."""
    sequence_ring: int = 1
    """Of these processes, how many exchange keys and values in a ring; the others exchange tokens for heads."""
    speculation: SpeculationPlan | None = None
    quantization: str = "none"
    gguf: dict[str, str] = field(default_factory=dict)
    """Of a diffusion stage: by network, the GGUF file that has its weights."""
    offload: str = "none"
    """Of a diffusion stage: one of `OFFLOADS`."""
    kv_dtype: str = "auto"
    lora: LoraPlan | None = None
    """None: the stage takes no adapters."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    """Fields the deployment sets; the others are None."""

    def device_of(self, replica: int, rank: int = 0) -> str:
        """Where rank `rank` of replica number `replica` (both from 0) runs."""
        return self.devices[(replica * self.ranks + rank) % len(self.devices)]

    @property
    def ranks(self) -> int:
        """Processes of each replica."""
        return self.tensor_parallel * self.cfg_parallel * self.sequence_parallel


@dataclass(frozen=True, slots=True)
class EdgePlan:
    """One edge and what carries it."""

    source: str
    target: str
    connector: str
    """Its name in the deployment."""
    kind: ConnectorKind
    """`inproc` where both ends share a worker, else `shm`."""
    extra: dict[str, int] = field(default_factory=dict)
    """What the connector is made with, in bytes, where the deployment says: `shm_threshold_bytes` (smaller payloads
    ride in the message), `pool_bytes` (memory it starts with), `max_bytes` (memory it may grow to), `cuda_pool_bytes`
    (memory of its worker's CUDA device, for tensors that need not pass through the host)."""
    budget: int = 64 * MiB
    """Bytes that may be sent and not yet consumed."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of the whole deployment."""

    max_waiting: int = 2048
    """Requests admitted and not finished; the next one is refused (429)."""
    max_retries: int = 2
    """How often a request may lose the worker of one and the same stage and go on."""
    default_deadline: float | None = None
    """Seconds a request may take that names no deadline."""
    retained_bytes: int = 256 * MiB
    """Payloads a worker keeps for recovery."""
    drain_seconds: float = 10.0
    """How long a stop waits for running requests."""
    hang_seconds: float = 600.0
    """A worker that has requests and answers nothing for so long (longer than any one step takes) is killed and
    started again."""
    max_media_bytes: int = 64 * MiB
    """Of one picture, clip or recording as it comes in."""
    max_image_pixels: int = 64_000_000
    max_audio_seconds: float = 300.0
    max_video_frames: int = 768
    """Frames of one clip that are decoded and kept."""
    max_output_pixels: int = 4_194_304
    """Of one picture or frame that is made: height times width."""
    max_inference_steps: int = 200
    max_output_frames: int = 257
    """Of one video that is made."""
    max_outputs: int = 10
    """Pictures or videos of one request."""
    max_prompt_embeds_bytes: int = 0
    """Of a prompt that comes as embeddings; 0: none are taken, as their files are the client's to make."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A graph with a deployment laid over it."""

    graph: StageGraph
    stages: Mapping[str, StagePlan]
    """In topological order."""
    edges: tuple[EdgePlan, ...]
    """In the order of the graph."""
    groups: tuple[tuple[str, ...], ...]
    """The stages of each worker, in topological order; most groups have one."""
    limits: Limits
    hardware: Hardware

    def group_of(self, stage: str) -> tuple[str, ...]:
        """The stages that share a worker with `stage`, itself among them."""
        return next(group for group in self.groups if stage in group)

    def edge(self, source: str, target: str) -> EdgePlan:
        return next(edge for edge in self.edges if (edge.source, edge.target) == (source, target))
