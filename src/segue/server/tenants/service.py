"""The service as seen by a tenant: its own LoRA adapters, its share, its tokens counted."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from segue.messages.deltas import Delta, Finished, TextDelta
from segue.messages.errors import InvalidRequest, NotFound, SegueError, nearest, shown
from segue.messages.request import Appended, Request, TextPart
from segue.messages.tensors import items_of
from segue.orchestrator.service import Health, ModelCard, MovedWorker, Service
from segue.server.tenants.tenants import NOBODY, Account, Tenants, caller, calling

_CHARACTERS = 4
"""Approximate characters per token, for charging a prompt until its tokens are counted."""


class TenantService:
    """A `Service` in front of another. Adapters that a tenant loads are prefixed with the tenant's name, so that no
    other tenant can name them, and two may use the same name."""

    def __init__(self, service: Service, tenants: Tenants) -> None:
        self._service = service
        self._tenants = tenants
        self._loaded: dict[str, tuple[str, str]] = {}
        """Name in the service → (tenant that loaded it, the tenant's name for it)."""

    @property
    def card(self) -> ModelCard:
        """The model card, with the adapters of the deployment and the caller's own."""
        card = self._service.card
        adapters = {called: card.adapters[name] for called, name in self._adapters(caller()).items()}
        by_priority = card.by_priority and calling.get().account.tenant.priority
        return msgspec.structs.replace(card, adapters=adapters, by_priority=by_priority)

    def _adapters(self, tenant: str) -> dict[str, str]:
        """Names that a tenant may use → names in the service."""
        visible = {}
        for name in self._service.card.adapters:
            owner, called = self._loaded.get(name, (None, name))
            if owner is None or owner == tenant:
                visible[called] = name
        return visible

    def health(self) -> Health:
        return self._service.health()

    def metrics(self) -> bytes:
        return self._service.metrics()

    async def room(self) -> None:
        await self._service.room()

    def stream(self, request: Request) -> AsyncGenerator[Delta]:
        """Stream a request as the caller's tenant, whatever tenant the request names."""
        request, account = self._of_caller(request)
        return _charged(self._service.stream(request), request, account)

    def stream_appended(self, request: Request, pieces: AsyncGenerator[str | Appended]) -> AsyncGenerator[Delta]:
        request, account = self._of_caller(request)
        deltas = self._service.stream_appended(request, _charged_pieces(pieces, account, self._service.card))
        return _charged(deltas, request, account)

    def _of_caller(self, request: Request) -> tuple[Request, Account]:
        """The request as that of the caller's tenant, and the account that pays for it. Raises `NotFound`."""
        call = calling.get()
        account = self._tenants.account(request.tenant) if call is NOBODY else call.account
        adapter = request.adapter
        if adapter is not None:
            adapters = self._adapters(account.tenant.name)
            if adapter not in adapters:
                raise NotFound(f"there is no LoRA adapter {shown(adapter)}{nearest(adapter, adapters)}", field="model")
            adapter = adapters[adapter]
        own = msgspec.structs.replace(request, tenant=account.tenant.name, share=account.tenant.share, adapter=adapter)
        return own, account

    async def load_lora(self, name: str, path: str) -> None:
        own = self._own(name)
        if own != name and name in self._adapters(caller()):
            raise InvalidRequest(f"there is an adapter {name!r} already; unload it first", field="lora_name")
        await self._service.load_lora(own, path)
        if own != name:
            self._loaded[own] = (caller(), name)

    async def unload_lora(self, name: str) -> None:
        own, visible = self._own(name), self._adapters(caller())
        if own != name and visible.get(name) != own:
            if name in visible:
                raise InvalidRequest(
                    f"lora_name is {name!r}, an adapter of the deployment; it must be one that this key has loaded",
                    field="lora_name",
                )
            raise NotFound(f"there is no LoRA adapter {name!r}{nearest(name, visible)}", field="lora_name")
        await self._service.unload_lora(own)
        self._loaded.pop(own, None)

    async def move_worker(self, from_stage: str, to_stage: str) -> MovedWorker:
        return await self._service.move_worker(from_stage, to_stage)

    def _own(self, name: str) -> str:
        """The service's name of an adapter that the caller loads; a caller without a name is the operator."""
        return f"{caller()}/{name}" if caller() else name


def _charged(deltas: AsyncGenerator[Delta], request: Request, account: Account) -> AsyncGenerator[Delta]:
    return _charging(deltas, request, account) if account.counts_tokens else deltas


async def _charging(deltas: AsyncGenerator[Delta], request: Request, account: Account) -> AsyncGenerator[Delta]:
    """Yield the deltas and charge their tokens as they come.

    The prompt is charged by its length first, and corrected by `usage` at the end. A request that fails before its
    first delta is free. A later failure keeps its charge, or clients could set a `deadline` just before the end to read
    everything for free.
    """
    charged = _estimate(request)
    account.charge(charged)
    answered = False
    try:
        async with aclosing(deltas):
            async for delta in deltas:
                if isinstance(delta, TextDelta):
                    account.charge(len(delta.token_ids))
                    charged += len(delta.token_ids)
                elif isinstance(delta, Finished):
                    used = delta.usage.prompt_tokens + sum(delta.usage.completion_modalities.values())
                    account.charge(used - charged)
                    charged = used
                answered = True
                yield delta
    except SegueError:
        if not answered:
            account.charge(-charged)
        raise


async def _charged_pieces(
    pieces: AsyncGenerator[str | Appended], account: Account, card: ModelCard
) -> AsyncGenerator[str | Appended]:
    """Yield the pieces and charge each by its length: they are input that the usage does not count."""
    async with aclosing(pieces):
        async for piece in pieces:
            if account.counts_tokens:
                account.charge(_tokens(piece, card))
            yield piece


def _tokens(piece: str | Appended, card: ModelCard) -> int:
    """The tokens of a piece, approximately if it is text."""
    if isinstance(piece, str):
        return -(-len(piece) // _CHARACTERS)
    tensors = sum(
        len(items_of(part, spec)) * spec.tokens for part in piece.tensors for spec in [card.tensors[part.kind]]
    )
    return _tokens(piece.prompt or "", card) + len(piece.prompt_token_ids or ()) + tensors


def _estimate(request: Request) -> int:
    texts = [part.text for message in request.messages for part in message.content if isinstance(part, TextPart)]
    return len(request.prompt_token_ids or ()) + sum(map(len, [request.prompt or "", *texts])) // _CHARACTERS
