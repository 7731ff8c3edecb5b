"""`Omni`: `AsyncOmni` for scripts."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator, Iterable, Mapping
from concurrent.futures import Future
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self

from tqdm import tqdm

from segue.messages.errors import SegueError, ShuttingDown
from segue.messages.request import Request
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

        What can be seen to be wrong with a prompt is raised before any of them runs; what only a stage finds, after all
        have ended, and then there are no outputs: `as_completed` gives those of the others.
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
        if len(batch) == 1:
            return [self._call(self._async.generate(batch[0], step_bar=self._progress, **settings))]
        requests = [self._checked(prompt, settings, f"prompts[{place}]: ") for place, prompt in enumerate(batch)]
        results: dict[int, RequestOutput | SegueError] = {}
        with tqdm(total=len(requests), desc="generating", unit="req", disable=not self._progress) as bar:
            for place, result in self._ended(enumerate(requests)):
                results[place] = result
                bar.update()
        outputs = []
        for place in range(len(requests)):
            result = results[place]
            if isinstance(result, SegueError):
                raise result
            outputs.append(result)
        return outputs

    def as_completed(
        self, prompts: Prompt | Iterable[Prompt], **settings: Any
    ) -> Generator[tuple[int, RequestOutput | SegueError]]:
        """(place among the prompts, output or error) of each prompt as soon as it ends; `settings` as for `generate`.

        Prompts are taken from the iterable as there is room (`limits.max_waiting` run at a time), so there may be any
        number of them; what it raises is raised when those that were taken have ended. Closing the generator cancels
        what runs.
        """
        several: Iterable[Any] = [prompts] if isinstance(prompts, (str, Mapping)) else prompts
        requests = ((place, self._request_of(prompt, settings)) for place, prompt in enumerate(several))
        yield from self._ended(requests)

    def _checked(self, prompt: Prompt, settings: Mapping[str, Any], where: str) -> Request:
        """Raises what is wrong with it as far as that is seen here; `where` stands before it."""
        try:
            request = self._async.request(prompt, **settings)
            self._async.check(request)
        except SegueError as error:
            raise type(error)(where + error.message, field=error.field, stage=error.stage) from error
        return request

    def _request_of(self, prompt: Prompt, settings: Mapping[str, Any]) -> Request | SegueError:
        try:
            return self._async.request(prompt, **settings)
        except SegueError as error:
            return error

    def _ended(
        self, requests: Iterable[tuple[int, Request | SegueError]]
    ) -> Generator[tuple[int, RequestOutput | SegueError]]:
        """Run each when there is room, and give what comes of it as soon as it ends."""
        waiting = iter(requests)
        ended: SimpleQueue[tuple[int, RequestOutput | SegueError | BaseException]] = SimpleQueue()
        running: dict[int, Future[None]] = {}
        most = self._async.plan.limits.max_waiting
        more, broken = True, None

        async def run(place: int, request: Request | SegueError) -> None:
            try:
                if not isinstance(request, SegueError):
                    await self._async.room()  # others may be at it, too
                    ended.put((place, await self._async.output(request)))
                else:
                    ended.put((place, request))
            except BaseException as error:
                ended.put((place, error))
                raise

        try:
            while True:
                while more and len(running) < most:
                    try:
                        following = next(waiting, None)
                    except Exception as error:  # whatever prompts are made of; what runs goes on
                        following, broken = None, error
                    if following is None:
                        more = False
                        break
                    running[following[0]] = asyncio.run_coroutine_threadsafe(run(*following), self._loop)
                    if not ended.empty():
                        break  # what has ended goes out before more is taken
                if not running:
                    if broken is not None:
                        raise broken
                    return
                place, result = ended.get()
                del running[place]
                if isinstance(result, BaseException) and not isinstance(result, SegueError):
                    raise result
                more = more and not isinstance(result, ShuttingDown)
                yield place, result
        finally:
            for future in running.values():
                future.cancel()

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
