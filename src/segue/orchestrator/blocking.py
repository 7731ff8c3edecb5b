"""`Omni`: `AsyncOmni` for scripts."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tqdm import tqdm

from segue.orchestrator.omni import AsyncOmni, Prompt, Sampling
from segue.orchestrator.outputs import RequestOutput
from segue.orchestrator.service import Health, ModelCard
from segue.orchestrator.start_bars import StartBars

SETTLE_SECONDS = 10.0
"""How long `Omni` waits, when it is interrupted, for what it had begun to end."""


class Omni:
    """A running model, for scripts: `with Omni(DIR) as omni: [out] = omni.generate([...])`.

    The event loop runs in a thread of its own; a script needs no `__main__` guard.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        progress: bool = True,
        before_start: Callable[[AsyncOmni], object] | None = None,
        **settings: Any,
    ) -> None:
        """`progress`: show bars while starting and generating; `before_start`: called when the settings are checked and
        nothing is started; what it raises is raised, e.g. what `AsyncOmni.check` has to say of a request. `settings` as
        for `AsyncOmni`."""
        self._progress = progress
        bars = StartBars() if progress else None
        self._async = AsyncOmni(model, on_progress=bars.show if bars else None, **settings)
        if before_start is not None:
            before_start(self._async)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="segue-omni", daemon=True)
        self._thread.start()
        try:
            self._call(self._async.start())
        except BaseException:
            self._stop_loop()
            raise
        finally:
            if bars:
                bars.close()

    @property
    def card(self) -> ModelCard:
        return self._async.card

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        *,
        modalities: Iterable[str] | None = None,
        voice: str | None = None,
        sampling: Sampling = None,
        seed: int | None = None,
        options: Mapping[str, Any] | None = None,
        deadline: float | None = None,
        return_prompt_ids: bool = False,
        adapter: str | None = None,
        cache_salt: str | None = None,
        **parameters: Any,
    ) -> list[RequestOutput]:
        """All prompts at once, batched by the engines; outputs in the same order. `parameters`: see
        `AsyncOmni.request`.

        Raises the first request's error after all have ended, so that one bad prompt does not waste the others' work
        half-way; nothing keeps running.
        """
        single = isinstance(prompts, (str, Mapping))
        settings = {
            "modalities": modalities,
            "voice": voice,
            "sampling": sampling,
            "seed": seed,
            "options": options,
            "deadline": deadline,
            "return_prompt_ids": return_prompt_ids,
            "adapter": adapter,
            "cache_salt": cache_salt,
            **parameters,
        }
        batch: list[Prompt] = [prompts] if single else list(prompts)  # type: ignore[list-item]
        return self._call(self._generate_all(batch, settings))

    async def _generate_all(self, batch: list[Prompt], settings: dict[str, Any]) -> list[RequestOutput]:
        with tqdm(total=len(batch), desc="generating", unit="req", disable=not self._progress or len(batch) < 2) as bar:

            async def one(prompt: Prompt) -> RequestOutput:
                try:
                    return await self._async.generate(prompt, step_bar=bar.disable and self._progress, **settings)
                finally:
                    bar.update()

            results = await asyncio.gather(*(one(prompt) for prompt in batch), return_exceptions=True)
        outputs = []
        for result in results:
            if isinstance(result, BaseException):
                raise result
            outputs.append(result)
        return outputs

    def tokenize(self, prompt: Prompt) -> list[int]:
        """The ids a prompt becomes, chat template and placeholders of media included."""
        return self._call(self._async.tokenize(prompt))

    def detokenize(self, token_ids: Iterable[int]) -> str:
        """The text of ids, special tokens included."""
        return self._call(self._async.detokenize(token_ids))

    def load_lora(self, name: str, path: str | Path) -> None:
        """Let requests name a LoRA adapter; see `AsyncOmni.load_lora`."""
        self._call(self._async.load_lora(name, path))

    def unload_lora(self, name: str) -> None:
        """Let no further request name it; those that run go on with it. Raises `NotFound`."""
        self._call(self._async.unload_lora(name))

    def health(self) -> Health:
        return self._async.health()

    def close(self) -> None:
        """Drain, end every process, free everything. Idempotent."""
        if self._loop.is_closed():
            return
        try:
            self._call(self._async.stop())
        finally:
            self._stop_loop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _call(self, coroutine: Any) -> Any:
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            raise

    def _stop_loop(self) -> None:
        """Let what was cancelled clean up after itself first: an interrupted start still has processes to end."""

        async def settle() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            if others:
                await asyncio.wait(others, timeout=SETTLE_SECONDS)

        asyncio.run_coroutine_threadsafe(settle(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
