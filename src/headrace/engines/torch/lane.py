"""A lane: the sequences that are decoded together with one set of weights, and their key/value cache.

The running sequences always occupy slots 0..n-1, so the cache is read without gathering. The last prompt token is not
prefilled but fed to the first decoding step: prefill needs no logits, and sequences with the same prompt share one
prefill.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

import torch

from headrace.data.packing import cut_by_tokens
from headrace.engines.request import Request
from headrace.engines.torch.prefix_cache import KeptCaches
from headrace.engines.torch.sampling import is_plain, sample_tokens
from headrace.models.causal import CausalModel, Draws
from headrace.models.packed import PackedRows

_MOST_STEPS, _MOST_STEPS_S = 32, 0.01  # of one native call, which nothing interrupts
_ROOM = 128  # tokens of a reply for which there is room from the beginning: to make more means to copy all caches


class Lane:
    """Owned by the engine's thread. Only `waiting` and `urgent` are shared with others, under the engine's lock."""

    def __init__(
        self, model: CausalModel, version: int, max_batch: int, prefill_tokens: int, kept_tokens: int = 0
    ) -> None:
        self.model = model
        self.version = version
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        self.urgent: deque[Request] = deque()  # goes before `waiting`
        self._max_batch = max_batch
        self._prefill_tokens = prefill_tokens
        self._cache = model.new_cache()
        # what was decoded is rounded otherwise than what is prefilled, which fixed shapes are meant to rule out
        self._kept = KeptCaches(kept_tokens if model.continues_prefixes and not model.row_block else 0)
        self.sampled = 0  # tokens, since the lane is there
        self._steps = 1  # of the next native call
        self._cached = True  # False: the caches of running sequences are gone, or out of date

    @property
    def busy(self) -> bool:
        """Whether there is anything to decode."""
        return bool(self.running or self.waiting or self.urgent)

    def take_waiting(self) -> list[Request]:
        """Requests that may join now: as many as there are free slots, within the budget for prefilling."""
        taken: list[Request] = []
        budget = self._prefill_tokens
        while (queue := self.urgent or self.waiting) and len(self.running) + len(taken) < self._max_batch:
            if taken and budget < len(queue[0].prompt):
                break
            request = queue.popleft()
            budget -= len(request.prompt)
            taken.append(request)
        return taken

    def take_all(self) -> list[Request]:
        """Everything that runs or waits; the lane is empty then."""
        taken = [*self.running, *self.urgent, *self.waiting]
        self.running, self.urgent, self.waiting = [], deque(), deque()
        return taken

    def drop_cancelled_waiting(self) -> None:
        """Forget waiting requests whose callers have gone."""
        self.urgent = deque(r for r in self.urgent if not r.result.cancelled())
        self.waiting = deque(r for r in self.waiting if not r.result.cancelled())

    def drop_cancelled_running(self) -> None:
        """Free the slots of running requests whose callers have gone."""
        self._leave([r for r in self.running if r.result.cancelled()])

    def advance(self, joined: Sequence[Request]) -> list[tuple[Request, str]]:
        """A token or a few for every running sequence and those that join; what has ended by it, with the reason."""
        if not self._cached:
            self._rebuild()
        if joined:
            first = len(self.running)
            self.running += joined
            self._cache.ensure(len(self.running), max(len(r.prompt) + min(r.limit, _ROOM) for r in joined))
            self._prefill(joined, first)
            self._steps = 1  # others may be about to join as well
        if not self.running:
            return []
        self._decode()
        ended = [(request, reason) for request in self.running if (reason := request.finish_reason()) is not None]
        for request, _ in ended:
            self._keep(request)
        self._leave([request for request, _ in ended])
        return ended

    def load(self, version: int, model: CausalModel | None, recompute: bool) -> None:
        """Go on under new weights: another model's, or those that this one's were changed to."""
        self._kept.forget()
        self.model, self.version = model or self.model, version
        self.model.renew()
        if recompute and self.running:
            self._cached = False

    def release(self) -> None:
        """Give the caches' memory back."""
        self._kept.forget()
        self._cache.release()
        self._cached = not self.running

    def start_over(self) -> None:
        """Let what is running wait again, before the others, with nothing sampled."""
        for request in self.running:
            request.start_over()
        self.waiting.extendleft(reversed(self.running))
        self.running = []
        self._cache, self._cached = self.model.new_cache(), True

    def _leave(self, requests: Sequence[Request]) -> None:
        """Free the requests' slots; the last sequences move into them so that slots stay contiguous."""
        gone = {self.running.index(request) for request in requests}
        if self._cached and gone:
            self._cache.free(gone)
        left = len(self.running) - len(gone)
        movers = (slot for slot in range(left, len(self.running)) if slot not in gone)
        for slot, mover in zip(sorted(slot for slot in gone if slot < left), movers, strict=True):
            if self._cached:
                self._cache.move(mover, slot, self.running[mover].cached)
            self.running[slot] = self.running[mover]
        del self.running[left:]

    def _prefill(self, joined: Sequence[Request], first_slot: int) -> None:
        owners = {r.prompt: i for i, r in enumerate(self.running[:first_slot]) if r.prefill_version == self.version}
        fresh: list[tuple[int, Request]] = []
        continued: list[tuple[int, Request, int]] = []
        copies: list[tuple[int, int, int]] = []
        for slot, request in enumerate(joined, first_slot):
            request.prefill_version = self.version
            if len(request.prompt) == 1:
                continue
            owner = owners.setdefault(request.prompt, slot)
            if owner == slot:
                begun, content = self._kept.beginning_of(request.prompt[:-1])
                if begun:
                    self._cache.put(slot, begun, content)
                    continued.append((slot, request, begun))
                else:
                    fresh.append((slot, request))
            else:
                copies.append((owner, slot, len(request.prompt) - 1))
        if fresh:
            rows = self._packed([request.prompt[:-1] for _, request in fresh])
            self.model.prefill(self._cache, rows, [slot for slot, _ in fresh])
        self._prefill_rest([new for new in continued if new[2] < len(new[1].prompt) - 1])
        for owner, slot, length in copies:
            self._cache.share(owner, slot, length)

    def _prefill_rest(self, requests: Sequence[tuple[int, Request, int]]) -> None:
        """Prefill what comes after the cached prefixes in the slots."""
        if requests:
            begin = [begun for _, _, begun in requests]
            rows = PackedRows.from_rows([request.prompt[begun:-1] for _, request, begun in requests], begin=begin)
            self.model.prefill(self._cache, rows, [slot for slot, _, _ in requests], begin)

    def _keep(self, request: Request) -> None:
        """For the next turn of the same conversation, if all of it was computed under the weights of now."""
        if request.prefill_version != self.version or any(version != self.version for version in request.versions):
            return
        ids = (request.prompt + tuple(request.ids))[: request.cached]
        if self._kept.ended(ids):
            self._kept.keep(ids, self._cache.take(self.running.index(request), len(ids)))

    @torch.no_grad()
    def _decode(self) -> None:
        running = self.running
        ids_B, lengths = torch.tensor([r.last_token for r in running], device="cpu"), [r.cached for r in running]
        seeds, positions = [r.seed for r in running], [len(r.ids) for r in running]
        if all(is_plain(r.params) for r in running):
            steps = 1 if any(r.params.stop for r in running) else self._steps
            steps = min(steps, *(r.limit - len(r.ids) for r in running))
            draws = Draws(seeds, positions, frozenset[int]().union(*(r.stop_ids for r in running)), steps)
            self._cache.ensure(len(running), max(lengths) + steps)
            began = time.perf_counter()
            sampled = self.model.decode_and_sample(self._cache, ids_B, lengths, draws)
            if sampled is not None:
                tokens_SB, logprobs_SB = sampled
                step_s = (time.perf_counter() - began) / len(tokens_SB)
                self._steps = max(1, min(4 * self._steps, _MOST_STEPS, int(_MOST_STEPS_S / step_s)))
                for request, tokens, logprobs in zip(
                    running, tokens_SB.t().tolist(), logprobs_SB.t().tolist(), strict=True
                ):
                    request.take(tokens, logprobs, logprobs, self.version)
                self.sampled += tokens_SB.numel()
                return
        self._cache.ensure(len(running), max(lengths) + 1)
        hidden = self.model.decode(self._cache, ids_B, lengths)
        logits_BV = self.model.decode_logits(hidden)
        drawn = sample_tokens(logits_BV, [r.params for r in running], seeds, positions)
        for request, token, logprob, model_logprob in zip(running, *drawn, strict=True):
            request.take([token], [logprob], [model_logprob], self.version)
        self.sampled += len(running)

    def _rebuild(self) -> None:
        """Compute the caches of all running sequences again, under the weights of now."""
        self._cached = True
        if not self.running:
            return
        # with fixed shapes, what these weights computed token by token can be computed again bit for bit
        exact = [r for r in self.running if self.model.row_block and r.prefill_version == self.version]
        exact.sort(key=lambda request: -len(request.ids))
        others = [r for r in self.running if r not in exact]
        self.running = exact + others
        self._cache.release()
        self._cache.ensure(len(self.running), max(r.cached for r in self.running) + 1)
        if exact:
            self._prefill(exact, 0)
            self._replay(exact)
        if others:
            self._prefill_all(others, len(exact))

    def _replay(self, requests: Sequence[Request]) -> None:
        """Feed what was sampled once more, one token at a time; the longest come first, in slots from 0."""
        for fed in range(len(requests[0].ids)):
            feeding = [r for r in requests if len(r.ids) > fed]
            ids_B = torch.tensor([r.ids[fed - 1] if fed else r.prompt[-1] for r in feeding], device="cpu")
            self.model.decode(self._cache, ids_B, [len(r.prompt) - 1 + fed for r in feeding])

    def _prefill_all(self, requests: Sequence[Request], first_slot: int) -> None:
        """Prefill prompts with what was sampled, within the budget at once."""
        for request in requests:
            request.prefill_version = -1  # rounded otherwise than a prompt alone, so it is not for others to copy
        slots = [slot for slot, r in enumerate(requests, first_slot) if r.cached]
        rows = [(r.prompt + tuple(r.ids))[:-1] for r in requests if r.cached]
        for indices in cut_by_tokens(rows, self._prefill_tokens):
            chosen = self._packed([rows[i] for i in indices])
            self.model.prefill(self._cache, chosen, [slots[i] for i in indices])

    def _packed(self, rows: Sequence[Sequence[int]]) -> PackedRows:
        return PackedRows.from_rows(rows, self.model.shares_prefixes)
