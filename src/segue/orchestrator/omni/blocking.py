"""`Omni`: the blocking form of `AsyncOmni`, for scripts."""

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
from segue.models.model_graph import ModelGraph
from segue.orchestrator.omni.async_omni import AsyncOmni, Prompt, Sampling
from segue.orchestrator.omni.outputs import RequestOutput
from segue.orchestrator.omni.progress import StartBars
from segue.orchestrator.service import Health, ModelCard

SETTLE_SECONDS = 10.0
"""How long an interrupted `Omni` waits for its running tasks to end."""


class Omni:
    """A running model, for scripts: `with Omni(DIR) as omni: [out] = omni.generate([...])`.

    The event loop runs in a thread of its own; a script needs no `__main__` guard.
    """

    def __init__(
        self,
        model: str | Path | ModelGraph,
        *,
        progress: bool = True,
        before_start: Callable[[AsyncOmni], object] | None = None,
        **settings: Any,
    ) -> None:
        """`progress`: show bars while starting and generating; `before_start`: called after checking the settings and
        before anything starts; its exceptions propagate, e.g. those of `AsyncOmni.check`. `settings` as for
        `AsyncOmni`."""
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
        session: str = "",
        keep: bool = False,
        previous: str | None = None,
        **parameters: Any,
    ) -> list[RequestOutput]:
        """Run all prompts at once, batched by the engines, and return outputs in the same order. `parameters`: see
        `AsyncOmni.request`.

        An error that is found without running a stage is raised before any prompt runs; an error of a stage is raised
        after all prompts have ended, without outputs: `as_completed` also gives the outputs of the other prompts.
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
            "session": session,
            "keep": keep,
            "previous": previous,
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
        """Yield (index of the prompt, output or error) as soon as each prompt ends; `settings` as for `generate`.

        It takes prompts from the iterable as others end (`limits.max_waiting` run at a time), so there may be any
        number of them; an exception of the iterable is raised after the prompts taken so far have ended. Closing the
        generator cancels running prompts.
        """
        several: Iterable[Any] = [prompts] if isinstance(prompts, (str, Mapping)) else prompts
        requests = ((place, self._request_of(prompt, settings)) for place, prompt in enumerate(several))
        yield from self._ended(requests)

    def _checked(self, prompt: Prompt, settings: Mapping[str, Any], where: str) -> Request:
        """Make and check a request; `where` is the prefix of error messages."""
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
        """Run requests, up to `limits.max_waiting` at a time, and yield each result as soon as the request ends."""
        waiting = iter(requests)
        ended: SimpleQueue[tuple[int, RequestOutput | SegueError | BaseException]] = SimpleQueue()
        running: dict[int, Future[None]] = {}
        most = self._async.plan.limits.max_waiting
        more, broken = True, None

        async def run(place: int, request: Request | SegueError) -> None:
            try:
                if isinstance(request, SegueError):
                    ended.put((place, request))
                    return
                await self._async.room()  # other callers may fill the queue, too
                ended.put((place, await self._async.output(request)))
            except BaseException as error:
                ended.put((place, error))
                raise

        try:
            while True:
                while more and len(running) < most:
                    try:
                        following = next(waiting, None)
                    except Exception as error:  # the iterable may raise anything; running prompts go on
                        following, broken = None, error
                    if following is None:
                        more = False
                        break
                    running[following[0]] = asyncio.run_coroutine_threadsafe(run(*following), self._loop)
                    if not ended.empty():
                        break  # yield finished prompts before taking more
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
        """Return a prompt's token ids, including the chat template and media placeholders."""
        return self._call(self._async.tokenize(prompt))

    def detokenize(self, token_ids: Iterable[int]) -> str:
        """Return the text of token ids, including special tokens."""
        return self._call(self._async.detokenize(token_ids))

    def load_lora(self, name: str, path: str | Path) -> None:
        """Load a LoRA adapter that requests can name; see `AsyncOmni.load_lora`."""
        self._call(self._async.load_lora(name, path))

    def unload_lora(self, name: str) -> None:
        """Unload an adapter; running requests keep it, new ones cannot name it. Raises `NotFound`."""
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
        """Stop the loop after cancelled tasks have cleaned up: an interrupted start still has processes to end."""

        async def settle() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            if others:
                await asyncio.wait(others, timeout=SETTLE_SECONDS)

        asyncio.run_coroutine_threadsafe(settle(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
