"""What a client asks for, as it travels from the server to the input stage."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from segue.messages.diffusion import DiffusionParams
from segue.messages.errors import wrong
from segue.messages.sampling import SamplingParams, misfit

MediaKind = Literal["image", "audio", "video"]


class ArrayInfo(msgspec.Struct, frozen=True):
    """How to read `MediaPart.data` when it is a raw array and not an encoded file."""

    dtype: str
    """numpy name, e.g. `uint8`, `float32`."""
    shape: tuple[int, ...]
    """image: (height, width, 3) uint8 · audio: (samples,) float32 mono in [-1, 1] · video: (frames, h, w, 3) uint8."""
    rate: float | None = None
    """audio: samples per second (None: 16000) · video: frames per second (None: unknown)."""


class TextPart(msgspec.Struct, frozen=True, tag="text"):
    text: str
    embeds: bytes | None = None
    """The text as input embeddings in its place, [tokens, hidden]: a file as `torch.save` or safetensors writes it; the
    `text` is empty then."""
    field: str = ""
    """As of a `MediaPart`, where there are `embeds`."""


class MediaPart(msgspec.Struct, frozen=True, tag="media"):
    """One picture, clip or recording: the bytes of a file (any format PyAV or Pillow reads), or a raw array."""

    kind: MediaKind
    data: bytes
    array: ArrayInfo | None = None
    """None: `data` is an encoded file."""
    field: str = ""
    """Where in the client's request it stood, e.g. `messages[0].content[1]`; errors name it."""
    role: str = ""
    """What it is for, where a model takes pictures for several purposes, by the pipeline's argument: `mask_image`,
    `image_reference`, `last_image`. `mask`: as `mask_image`, but transparent where that is white. Empty: the picture
    itself."""


Part = TextPart | MediaPart


class Message(msgspec.Struct, frozen=True):
    role: str
    content: list[Part]
    extra: dict[str, Any] = {}
    """What the chat template may want besides: `name`, `tool_calls`, `tool_call_id`, `reasoning_content`, as OpenAI
    has them."""


class ChatOptions(msgspec.Struct, frozen=True):
    """How `messages` become a prompt."""

    tools: list[dict[str, Any]] = []
    """As OpenAI has them."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs: dict[str, Any] = {}
    """Passed to the chat template, e.g. `enable_thinking`."""


class Request(msgspec.Struct, kw_only=True):
    """One generation. One of `messages`, `prompt`, `prompt_token_ids` and `prompt_embeds` is set; beside a `prompt` for
    a model that makes pictures or video, the `messages` hold nothing but the media that go with it."""

    request_id: str
    messages: list[Message] = []
    chat: ChatOptions = ChatOptions()
    prompt: str | None = None
    """Text that is tokenized as it is, with no chat template."""
    prompt_token_ids: list[int] | None = None
    prompt_embeds: bytes | None = None
    """The prompt as input embeddings, [tokens, hidden]: a file as `torch.save` or safetensors writes it."""
    add_special_tokens: bool | None = None
    """Let the tokenizer add its own (a beginning of text, an end). None: to a `prompt` it does, to templated messages,
    whose template writes them, it does not."""
    modalities: list[str] = msgspec.field(default_factory=lambda: ["text"])
    """What the client wants out: any of what the graph gives; `tokens` is the prompt itself, from the input stage."""
    voice: str | None = None
    sampling: dict[str, SamplingParams] = {}
    """By stage name. The orchestrator fills in the family's defaults and the seed at admission."""
    diffusion: DiffusionParams | None = None
    """None: all defaults, where the model has a diffusion stage."""
    seed: int | None = None
    """Given at admission where the client gave none, so that any part can be run again."""
    priority: int = 0
    """Lower runs first."""
    tenant: str = ""
    """Whose request it is, for fair sharing."""
    adapter: str | None = None
    """Name of the LoRA adapter to use."""
    deadline: float | None = None
    """Unix time after which the request is cancelled."""
    cache_salt: str | None = None
    """Prompts are found in the prefix cache only among requests with the same salt: nobody else can learn by the time
    to the first token what was asked."""
    thought_marks: tuple[str, str] | None = None
    """What opens a thought of the model and closes it; the orchestrator fills it in, where a stage's sampling bounds
    thoughts."""
    return_prompt_ids: bool = False
    """Give the prompt's token ids with the first text."""
    options: dict[str, Any] = {}
    """Family options by name (e.g. `use_audio_in_video`); the family's dialect checks them."""

    def embedded(self) -> list[TextPart]:
        """The parts of its messages that come as embeddings, in their order."""
        parts = (part for message in self.messages for part in message.content)
        return [part for part in parts if isinstance(part, TextPart) and part.embeds is not None]

    def media_kinds(self) -> set[str]:
        """The kinds of media the request carries."""
        return {part.kind for message in self.messages for part in message.content if isinstance(part, MediaPart)}


def check_types(request: Request) -> None:
    """Raise `InvalidRequest` where a field holds what its type does not allow.

    Nothing holds a Python caller to the types, and a worker cannot answer a message that it cannot decode. The messages
    are not looked at: they are made by `segue.media.parts`, and may be large.
    """
    if isinstance(request.seed, int) and not -(2**63) <= request.seed < 2**64:
        raise wrong("seed", request.seed, "a 64-bit integer")
    try:
        msgspec.msgpack.decode(msgspec.msgpack.encode(msgspec.structs.replace(request, messages=[])), type=Request)
    except (msgspec.ValidationError, TypeError, OverflowError) as error:
        raise misfit(error) from error
