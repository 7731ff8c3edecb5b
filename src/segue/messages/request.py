"""A client's request, as it travels from the server to the input stage."""

from __future__ import annotations

from typing import Any

import msgspec

from segue.messages.diffusion import DiffusionParams
from segue.messages.errors import wrong
from segue.messages.formats import Format
from segue.messages.sampling import SamplingParams, misfit
from segue.messages.units import Unit

MULTI_MODAL_DATA = "multi_modal_data"
"""Clients' name for the media that are sent along with a prompt; vLLM's."""
MEDIA = ("image", "audio", "video")
"""The kinds of media; any other kind of a part is the name of a tensor that the model's graph declares."""


class ArrayInfo(msgspec.Struct, frozen=True):
    """How to read `MediaPart.data` when it is a raw array and not an encoded file."""

    dtype: str
    """numpy name, e.g. `uint8`, `float32`."""
    shape: tuple[int, ...]
    """image: (height, width, 3) uint8 · audio: (samples,) float32 mono in [-1, 1] · video: (frames, h, w, 3) uint8 ·
    a tensor: that of one item, or of several with an axis in front."""
    rate: float | None = None
    """audio: samples per second (None: 16000) · video: frames per second (None: unknown)."""
    written: bool = False
    """The numbers were written as text (nested lists): a tensor takes them in its declared dtype."""


class TextPart(msgspec.Struct, frozen=True, tag="text"):
    text: str
    embeds: bytes | None = None
    """Input embeddings in place of the text, [tokens, hidden]: a file as `torch.save` or safetensors writes it; the
    `text` is empty then."""
    field: str = ""
    """As in `MediaPart`; set only if there are `embeds`."""


class MediaPart(msgspec.Struct, frozen=True, tag="media"):
    """One image, audio or video: the bytes of a file (any format PyAV or Pillow reads), or a raw array. Or a named
    tensor (`segue.messages.tensors`): always a raw array."""

    kind: str
    """One of `MEDIA`, or the name of a tensor."""
    data: bytes
    array: ArrayInfo | None = None
    """None: `data` is an encoded file."""
    field: str = ""
    """Position in the client's request, e.g. `messages[0].content[1]`; errors name it."""
    role: str = ""
    """Purpose of the medium, if a model takes it for several; of an image by the pipeline's argument: `mask_image`,
    `image_reference`, `last_image`. `mask`: as `mask_image`, but transparent where that is white. Of a recording,
    `voice`: the one to speak with. Empty: the medium itself."""
    frames: int | None = None
    """For a video: sample this many frames, evenly spread, instead of the model's own rate."""


Part = TextPart | MediaPart


class Message(msgspec.Struct, frozen=True):
    role: str
    content: list[Part]
    extra: dict[str, Any] = {}
    """Further fields for the chat template: `name`, `tool_calls`, `tool_call_id`, `reasoning_content`, in OpenAI's
    format."""


class ChatOptions(msgspec.Struct, frozen=True):
    """How the chat template turns `messages` into a prompt."""

    tools: list[dict[str, Any]] = []
    """In OpenAI's format."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs: dict[str, Any] = {}
    """Passed to the chat template, e.g. `enable_thinking`."""


class Appended(msgspec.Struct, frozen=True, kw_only=True):
    """Input that is appended to an open request. Exactly one of `prompt`, `prompt_token_ids` and `tensors` is set."""

    prompt: str | None = None
    """Text, tokenized by itself and without special tokens."""
    prompt_token_ids: list[int] | None = None
    tensors: list[MediaPart] = []
    """Named tensors, in order."""
    reply: bool = False
    """As `Request.reply`, for this piece."""


NOTHING = "received"
"""The field of the error of a request whose model gets nothing: a transform returned None."""


class Received(msgspec.Struct, frozen=True):
    """What a model of a graph of models gets from another one."""

    source: str
    """The model that made it."""
    part: Part
    transform: str = ""
    """As in `segue.graph.parts.Link`."""
    visit: int = 0
    """The visit that it was for: what each visit gets and then writes are turns of one conversation."""
    own: bool = False
    """The model wrote it in that visit."""


class Request(msgspec.Struct, kw_only=True):
    """One generation. Exactly one of `messages`, `prompt`, `prompt_token_ids` and `prompt_embeds` is set, except that a
    `prompt` or `prompt_token_ids` may come with `messages` that hold nothing but its media, in order."""

    request_id: str
    messages: list[Message] = []
    chat: ChatOptions = ChatOptions()
    prompt: str | None = None
    """Text that is tokenized without a chat template."""
    prompt_token_ids: list[int] | None = None
    prompt_embeds: bytes | None = None
    """The prompt as input embeddings, [tokens, hidden]: a file as `torch.save` or safetensors writes it."""
    add_special_tokens: bool | None = None
    """Whether the tokenizer adds its special tokens (begin and end of text). None: it adds them to a `prompt`, but not
    to templated messages, whose template writes them."""
    modalities: list[str] = msgspec.field(default_factory=lambda: ["text"])
    """Requested outputs: any modality that the graph gives; `tokens` is the prompt itself, from the input stage."""
    formats: dict[str, Format] = {}
    """Requested modality → the files in which the client gets it (`EncodedDelta`), instead of raw deltas. Previews of a
    video have the format of `image`; without one, there are none if the video has a format."""
    voice: str | None = None
    sampling: dict[str, SamplingParams] = {}
    """By stage name. A stage merges them with the defaults (`merged`)."""
    diffusion: DiffusionParams | None = None
    """None: all defaults, if the model has a diffusion stage."""
    seed: int | None = None
    """The orchestrator draws one at admission if the client gave none, so that any part can be run again."""
    priority: int = 0
    """Lower runs first."""
    tenant: str = ""
    """Owner of the request, for fair sharing."""
    share: float = 1.0
    """Weight of the tenant in fair sharing: a tenant with 2 gets twice as much as a tenant with 1."""
    adapter: str | None = None
    """Name of the LoRA adapter to use."""
    deadline: float | None = None
    """Unix time after which the request is cancelled."""
    cache_salt: str | None = None
    """Requests share prefix cache entries only if their salts are equal: nobody else can infer a prompt from the time
    to the first token."""
    session: str = ""
    """Requests of one session go to one replica of a stage that is routed by session; empty: of none."""
    thought_marks: tuple[str, str] | None = None
    """The texts that open and close the model's reasoning; the orchestrator fills them in if a stage's sampling bounds
    reasoning."""
    return_prompt_ids: bool = False
    """Return the prompt's token ids with the first text."""
    open: bool = False
    """Input is appended while the request runs, until it is closed."""
    reply: bool = False
    """For an open request: the model replies to its input before it takes what is appended. Without a reply, what is
    appended continues the input."""
    options: dict[str, Any] = {}
    """Family options by name (e.g. `use_audio_in_video`); checked against those that the family declares."""
    keep: str = ""
    """The name by which others of its tenant may go on from it after its end: what it said and got is retained, and its
    blocks of the KV cache are held for a while. Empty: none may."""
    previous: str | None = None
    """The name of a kept request that this one goes on from: its input follows what that one read and generated."""
    earlier: list[Earlier] = []
    """The conversation before this request, if it has a `previous`; the orchestrator fills it in."""

    member: str = ""
    """In a graph of models: the model that the request is for."""
    received: list[Received] = []
    """In a graph of models: what the model gets from others, and in a later visit all that it got and wrote before. The
    input worker makes the messages of it."""
    raw: list[str] = []
    """In a graph of models: requested modalities of `formats` of which samples or pixels are needed, too."""

    def embedded(self) -> list[TextPart]:
        """Return the parts of the messages that are embeddings, in order."""
        parts = (part for message in self.messages for part in message.content)
        return [part for part in parts if isinstance(part, TextPart) and part.embeds is not None]

    def media(self) -> list[MediaPart]:
        """Return the media and the tensors of the messages, in order."""
        return [part for message in self.messages for part in message.content if isinstance(part, MediaPart)]

    def tensors(self) -> list[MediaPart]:
        """Return the named tensors of the messages, in order."""
        return [part for part in self.media() if part.kind not in MEDIA]

    def media_kinds(self) -> set[str]:
        """Return the kinds of media in the request, and the names of its tensors."""
        received = (one.part.kind for one in self.received if isinstance(one.part, MediaPart))
        earlier = (kind for one in self.earlier for kind in one.media_kinds())
        return {part.kind for part in self.media()} | set(received) | set(earlier)


class Earlier(msgspec.Struct, frozen=True):
    """A request that another goes on from, and the reply to it."""

    request: Request
    """Without what came before it."""
    units: list[Unit]
    """What the stage that read it generated: token ids, or rows of codes."""
    ends: list[int] = []
    """If the walk returned to that stage: how many of the units were there at the end of each visit."""
    images: list[MediaPart] = []
    """The images of the reply, in order."""

    def media_kinds(self) -> set[str]:
        """Return the kinds of media in the request and in the reply."""
        return self.request.media_kinds() | {image.kind for image in self.images}


def check_priority(priority: int, by_priority: bool) -> None:
    """Raise `InvalidRequest` for a priority that has no effect because no stage is scheduled `by_priority`."""
    if priority and not by_priority:
        raise wrong(
            "priority",
            priority,
            "left out or 0: only a deployment with `scheduling: priority` takes another (and, if clients have keys of "
            "their own, only from clients whose keys allow it)",
        )


def check_types(request: Request) -> None:
    """Raise `InvalidRequest` if a field's value does not fit its type.

    Python does not enforce the types, and a worker cannot answer a message that it cannot decode. `messages` are not
    checked: `segue.media.parts` makes them, and they may be large.
    """
    if isinstance(request.seed, int) and not -(2**63) <= request.seed < 2**64:
        raise wrong("seed", request.seed, "a 64-bit integer")
    try:
        bare = msgspec.structs.replace(request, messages=[], received=[], earlier=[])
        msgspec.msgpack.decode(msgspec.msgpack.encode(bare), type=Request)
    except (msgspec.ValidationError, TypeError, OverflowError) as error:
        raise misfit(error) from error
