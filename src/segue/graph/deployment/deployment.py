"""The deployment: where and how each stage of a graph runs. `segue.graph.deployment.loader.load_plan` applies one to a
graph.

The file is YAML; every key is optional, and so is the file. `null` means "chosen automatically". Sizes are bytes, or
text such as `64MiB` and `1GB`.

    defaults: {dtype: bfloat16}           # any key of a stage, for every stage but `input`
    stages:
      thinker:
        devices: [cuda:0]                 # auto, cpu, cuda:N, or a list; replicas take its entries round-robin
        replicas: 1                       # by default one per device; or {min: 1, max: 4, queue_age: 5}: by load
        node: server                      # the host it runs on, or a list for its replicas in turn (`segue join`)
        routing: [load, prefix]           # how requests choose a replica: load, prefix, session, most important first
        memory_share: 0.5                 # fraction of its device, per replica: weights, cache and activations together
        dtype: bfloat16                   # auto (float32 on a CPU, else bfloat16), float32, bfloat16, float16
        threads: 2                        # CPU threads of its worker
        max_batch: 64                     # requests (autoregressive), rows (diffusion) or work items (module) per step
        load_format: auto                 # auto, dummy (random weights of the right shape)
        fuse_with: null                   # share a worker with this stage; null: not even if the model suggests it
        options: {look_ahead: 2}          # the family's own options
        # autoregressive stages only:
        max_tokens_per_step: 2048
        prefill_chunk: 256                # of these, prompt tokens in a step in which other requests decode
        max_model_len: null
        block_size: 16                    # tokens per block of the KV cache
        kv_blocks: null                   # null: as many as memory_share holds
        prefix_caching: true
        prefix_states: null               # recurrent states of prefixes to keep; null: as many as max_batch
        deterministic: false              # bitwise equal logits in any batch
        max_logprobs: 20                  # most logprobs a request may ask for per position; -1: any number
        attention: auto                   # auto, torch, cpu, triton, flex, flashinfer, flash_attn
        enforce_eager: false              # true: no CUDA graphs
        compile: false                    # torch.compile for the layers of the decoder (of the denoiser: its blocks)
        tensor_parallel: 1                # processes per replica, each with a part of the weights
        quantization: none                # bfloat16 (on a CPU), int8, int4, fp8: format of the weights after loading
        kv_dtype: auto                    # fp8: float8 keys and values
        lora: {adapters: {poet: /srv/poet}, max_rank: 64, max_adapters: 16}   # {} or more: the stage takes adapters
        scheduling: fcfs                  # fcfs (arrival), priority (then arrival), fair (shares between tenants)
        speculation: {method: ngram, tokens: 4}     # or draft, eagle, medusa with a model; or mtp
        sampling: {temperature: 0.7}      # overrides the family's defaults; the request overrides it
    skip_tokenizer_init: false            # true: load no tokenizer; prompts and replies are token ids
    edges:
      - {from: thinker, to: talker, connector: shm, budget: 64MiB}     # budget: bytes sent and not yet consumed
      - {from: talker, to: vocoder, wire: exact}    # or bfloat16: float32 between hosts takes half the bytes
    runtime:
      connectors:
        shm: {name: SharedMemoryConnector, extra: {shm_threshold_bytes: 65536, pool_bytes: 64MiB, max_bytes: 512MiB}}
    limits: {max_waiting: 2048, max_retries: 2, default_deadline: null, retained_bytes: 256MiB, drain_seconds: 10,
             hang_seconds: 600}
    moves: {queue_age: 5, cooldown: 60}   # seconds a request waits before its stage gets a worker; off without the key
    placement: join                       # or ray: Ray starts the nodes, instead of `segue join` on each; then with
    # nodes: {second: {cpus: 16, memory: 64GiB, gpus: [24GiB]}}   # what a host has that is not there yet
    # ray: {address: auto, nodes: {second: {num_gpus: 1, accelerator_type: H100}}}   # also num_cpus, resources, model

Of these, diffusion stages have `scheduling` (fcfs or priority), `compile`, `quantization` and `attention` (auto,
native, cudnn, flash, flash_3, sage, xformers), `gguf: model.gguf` (weights from that file), `offload: layerwise`
(weights stay in host memory), and three ways to use several processes per replica, which multiply: `cfg_parallel: 2`
(guidance branches), `sequence_parallel: 2` (tokens; with `sequence_mode: ulysses`, `ring`, or `{ulysses: 2, ring: 2}`)
and `tensor_parallel: 2` (weights).

`limits` has the keys of `Limits`; `defaults` do not apply to `input`, which runs on the CPU. The in-process connector
joins stages that are fused into one worker; an edge between hosts gets TCP automatically, every other one shared
memory: the connector called `tcp` or `shm`, or the only TcpConnector or SharedMemoryConnector that the file defines.

The format of vllm-omni's connector documentation is accepted too: `connectors` at the top level or under `runtime`, and
a list of stages, called `stages` or `stage_args`:

    stage_args:
      - {stage_id: 0, output_connectors: {to_stage_1: connector_of_shared_memory}}
      - {stage_id: 1, input_connectors: {from_stage_0: connector_of_shared_memory}}

`stage_name` names a stage, `stage_id` gives its position, from 0, in the topological order of the graph without
`input` (`segue graph MODEL` prints stages in this order). `to_stage_` and `from_stage_` take names or numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from segue.graph.deployment.stage_plan import StagePlan
from segue.graph.stage_graph import StageGraph
from segue.messages.addresses import SERVER
from segue.messages.limits import RequestLimits

MiB = 1 << 20

ConnectorKind = Literal["inproc", "shm", "tcp", "mooncake_store", "mooncake_engine", "nixl"]
REACH: Mapping[ConnectorKind, str] = {
    "inproc": "process",
    "shm": "host",
    "tcp": "network",
    "mooncake_store": "network",
    "mooncake_engine": "network",
    "nixl": "network",
}
"""Kind of connector → how far apart the ends of its edges may be (`segue.connectors.base.Reach`)."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """The resources of a machine. Memory in bytes."""

    cpus: int
    """Cores this process may use."""
    memory_bytes: int
    gpus: tuple[int, ...] = ()
    """Memory of each GPU; entry i is `cuda:i`. 0: unknown until a worker runs there."""
    gpu_names: tuple[str, ...] = ()
    gpu_notes: tuple[str, ...] = ()
    """Restrictions on the use of GPUs, and reasons why GPUs of the machine cannot be used."""


@dataclass(frozen=True, slots=True)
class Hosts:
    """The hardware of every host."""

    server: Hardware
    nodes: Mapping[str, Hardware] = field(default_factory=dict)
    """Of the nodes that the deployment describes. The others are taken to be like the server until they join."""

    def of(self, node: str) -> Hardware:
        return self.nodes.get(node, self.server)


@dataclass(frozen=True, slots=True)
class EdgePlan:
    """One edge and its connector."""

    source: str
    target: str
    connector: str
    """The connector's name in the deployment."""
    kind: ConnectorKind
    """Unless the deployment names another: `inproc` if both ends share a worker, `shm` if they are on one host, else
    `tcp`."""
    extra: dict[str, int | str] = field(default_factory=dict)
    """The connector's settings from the deployment, sizes in bytes: `shm_threshold_bytes` (smaller payloads travel in
    the message), `pool_bytes` (initial memory), `max_bytes` (memory it may grow to), `cuda_pool_bytes` (memory on its
    worker's CUDA device, for tensors that need not pass through the host)."""
    budget: int = 64 * MiB
    """Bytes that may be sent and not yet consumed; each chunk counts as 1 KiB more than its payload."""
    start: int = 1
    """Chunks of a request that must be there before any is sent."""
    wire: str = "exact"
    """How float32 tensors travel: `exact`, or `bfloat16` between hosts (off by at most 2⁻⁸ of each value)."""


@dataclass(frozen=True, slots=True)
class Limits(RequestLimits):
    """Bounds of the whole deployment, and on each request."""

    max_waiting: int = 2048
    """Requests admitted and not finished; the next one is refused (429)."""
    max_retries: int = 2
    """How often a request may lose the worker of the same stage and still continue."""
    default_deadline: float | None = None
    """Seconds that a request without a deadline of its own may take."""
    http_deadline: float = 3600.0
    """The same for HTTP requests if `default_deadline` is not set; background jobs have none."""
    retained_bytes: int = 256 * MiB
    """Payloads a worker keeps for recovery."""
    unread_bytes: int = 8 * MiB
    """Output of one request that its client has not read; above it, the stages that make it pause."""
    max_kept: int = 256
    """Requests that are retained after their end because others may go on from them; the oldest are forgotten first."""
    kept_bytes: int = 256 * MiB
    """Bytes of what they said and got."""
    kept_seconds: float = 600.0
    """How long each of them is retained."""
    drain_seconds: float = 10.0
    """How long a stop waits for running requests."""
    hang_seconds: float = 600.0
    """A worker that has requests and answers nothing for this long (longer than any one step takes) is killed and
    restarted."""
    max_media_bytes: int = 64 * MiB
    """Bytes of one incoming image, audio or video file."""
    max_image_pixels: int = 64_000_000
    max_audio_seconds: float = 300.0
    max_video_seconds: float = 300.0
    max_video_frames: int = 768
    """Frames of one video that are sampled and kept."""
    max_request_pixels: int = 250_000_000
    """Pixels of all images and sampled frames of one request together, which are held in memory."""
    max_decoded_pixels: int = 40_000_000_000
    """Pixels of all frames decoded for one request, including frames that are not kept: an hour of small frames costs
    as much as a minute of large ones."""
    max_decode_seconds: float = 60.0
    """CPU time of decoding the media of one request."""
    max_grammar_bytes: int = 1024 * MiB
    """Memory that compiling one grammar may take."""
    max_output_pixels: int = 4_194_304
    """Pixels of one generated image or frame: height times width."""
    max_inference_steps: int = 200
    max_output_frames: int = 257
    """Frames of one generated video."""
    max_outputs: int = 10
    """Images or videos of one request."""
    max_prompt_embeds_bytes: int = 0
    """Size of a prompt given as embeddings; 0: none are accepted, as the client controls what is in these files."""


@dataclass(frozen=True, slots=True)
class MovePolicy:
    """When a worker moves to a stage whose requests wait, from one where none do."""

    queue_age: float
    """A stage gets a worker when a request has waited in its queue for this many seconds."""
    cooldown: float
    """Seconds between the end of a move and the next one."""


@dataclass(frozen=True, slots=True)
class RayNode:
    """What Ray reserves for a node: a bundle of a placement group, on a host of its own."""

    num_cpus: float = 1.0
    num_gpus: float = 0.0
    accelerator_type: str | None = None
    """Ray's name of a kind of accelerator, such as H100."""
    resources: Mapping[str, float] = field(default_factory=dict)
    """The cluster's own resources."""
    model: str | None = None
    """Directory of the checkpoint there; None: the same as on the server."""


@dataclass(frozen=True, slots=True)
class RayPlan:
    """The Ray cluster that runs the agents of the nodes."""

    address: str
    """`HOST:PORT` of its head; `auto`: the cluster that this host belongs to."""
    nodes: Mapping[str, RayNode]


@dataclass(frozen=True, slots=True)
class Plan:
    """A graph with its deployment."""

    graph: StageGraph
    stages: Mapping[str, StagePlan]
    """In topological order."""
    edges: tuple[EdgePlan, ...]
    """In the order of the graph."""
    groups: tuple[tuple[str, ...], ...]
    """The stages of each worker, in topological order; most groups have one."""
    limits: Limits
    hardware: Hardware
    """Of the server's host."""
    moves: MovePolicy | None = None
    """None: workers move only on command."""
    skip_tokenizer_init: bool = False
    """Load no tokenizer: prompts and replies are token ids."""
    ray: RayPlan | None = None
    """None: the nodes join by themselves."""
    hosts: Mapping[str, Hardware] = field(default_factory=dict)
    """The nodes that the deployment describes."""
    said: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Stage → key (devices, dtype, memory_share, threads) → path of the deployment's or caller's setting. Missing keys
    were chosen automatically."""

    def group_of(self, stage: str) -> tuple[str, ...]:
        """Return the stages that share a worker with `stage`, including `stage`."""
        return next(group for group in self.groups if stage in group)

    def nodes(self) -> tuple[str, ...]:
        """Return the names of all hosts that have a stage, except the server's."""
        names = {node: None for stage in self.stages.values() for node in stage.node}
        return tuple(name for name in names if name != SERVER)

    def edge(self, source: str, target: str) -> EdgePlan:
        return next(edge for edge in self.edges if (edge.source, edge.target) == (source, target))
