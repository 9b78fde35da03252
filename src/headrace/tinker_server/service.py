"""What the server knows: sessions, models in training, sampling sessions; and what each request does to them."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from tinker import types

from headrace.tinker_server.base import Base, LoraShape
from headrace.tinker_server.checkpoint_store import CheckpointPath, Store, check_name
from headrace.tinker_server.checks import check_adam, check_ttl, digest, known_run, texts
from headrace.tinker_server.losses import check_rows
from headrace.tinker_server.options import Refusal, ServeOptions
from headrace.tinker_server.promises import Promises, RequestQueue, Work
from headrace.tinker_server.sampler_cache import BASE, Samplers
from headrace.tinker_server.sampler_pool import SamplerPool
from headrace.tinker_server.sessions import SamplingSession, Session
from headrace.tinker_server.training import TrainedModel
from headrace.tinker_server.wire import Outcome, peek_train, read_train, train_outcome

_SAMPLERS = 10_000  # handles on weights that a session may have; its oldest go first
T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class LiveModel:
    """A model in training."""

    id: str
    session: Session
    trained: TrainedModel
    queue: RequestQueue
    metadata: Mapping[str, str] | None

    @property
    def shape(self) -> LoraShape:
        return self.trained.adapted.shape


class Service:
    """Everything behind the routes. Lives on the event loop; tensors of training live on a thread of their own."""

    def __init__(self, options: ServeOptions) -> None:
        if options.threads:
            torch.set_num_threads(options.threads)
        self.options = options
        self.store = Store(options.folder)
        self.base = Base(options)
        self.promises = Promises(int(options.results_mb * 2**20))
        self.pool = SamplerPool(self.base, options)
        # asking for their number makes the one that was set hold on that thread
        self._worker = ThreadPoolExecutor(1, "headrace-learner", initializer=torch.get_num_threads)
        self.samplers = Samplers(self.base, self.pool, self.store, self.on_learner, options.max_samplers)
        self.sessions: dict[str, Session] = {}
        self.models: dict[str, LiveModel] = {}
        self.sampling: dict[str, SamplingSession] = {}
        self._coming: set[str] = set()  # models that are being made

    async def on_learner(self, function: Callable[[], T]) -> T:
        """Run on the thread that trains."""
        return await asyncio.get_running_loop().run_in_executor(self._worker, function)

    async def close(self) -> None:
        """End all sessions and threads."""
        for session in list(self.sessions):
            self.end_session(session)
        await self.pool.close()
        self._worker.shutdown(wait=True, cancel_futures=True)

    # ---- sessions -------------------------------------------------------------------------------------------------

    def create_session(self, request: types.CreateSessionRequest) -> dict[str, Any]:
        if len(self.sessions) >= self.options.max_sessions:
            raise Refusal(
                f"{len(self.sessions)} sessions are open already; close a ServiceClient, or raise --max-sessions"
            )
        session = Session(str(uuid.uuid4()), request.user_metadata, request.display_name)
        self.sessions[session.id] = session
        return {"type": "create_session", "session_id": session.id}

    def heartbeat(self, session_id: str) -> dict[str, Any]:
        if session_id not in self.sessions:
            raise Refusal(f"the session {session_id[:80]} has ended, or is of before a restart", status=410)
        self.sessions[session_id].seen = time.monotonic()
        return {"type": "session_heartbeat"}

    def session(self, session_id: str) -> Session:
        """A session that has not ended. Using it counts as a heartbeat."""
        found = self.sessions.get(session_id)
        if found is None:
            raise Refusal(f"there is no session {session_id[:80]}; make a new ServiceClient", status=404)
        found.seen = time.monotonic()
        return found

    def end_session(self, session_id: str) -> None:
        """Free all that a session holds."""
        session = self.sessions.pop(session_id, None)
        if session is None:
            return
        for model_id in session.models:
            self._unload(model_id)
        ended = {found.key for one in session.samplers if (found := self.sampling.pop(one, None))}
        for key in ended - {sampling.key for sampling in self.sampling.values()}:
            self.samplers.forget(key)
        self.promises.drop_session(session_id)

    def end_silent_sessions(self, held_up_s: float = 0.0) -> list[str]:
        """End those whose heart has stopped; time for which we were held up ourselves does not count."""
        limit = time.monotonic() - self.options.session_timeout_s
        for session in self.sessions.values():
            session.seen += held_up_s
        silent = [session.id for session in self.sessions.values() if session.seen < limit]
        for session_id in silent:
            self.end_session(session_id)
        return silent

    async def outcome(self, request_id: str, timeout_s: float) -> Outcome | None:
        """What came of a request, or None if nothing did yet. Who waits for it is alive."""
        session = self.sessions.get(self.promises.session_of(request_id))
        if session is not None:
            session.seen = time.monotonic()
        return await self.promises.wait(request_id, timeout_s)

    # ---- models ---------------------------------------------------------------------------------------------------

    def create_model(self, request: types.CreateModelRequest, raw: bytes) -> dict[str, Any]:
        session = self.session(request.session_id)
        model_id = f"{session.id}:train:{request.model_seq_id}"
        request_id, mark = f"{model_id}:0", digest(raw)
        if self.promises.find(request_id, mark) is None:
            shape = self._shape(request)
            if (count := len(self.models.keys() | self._coming)) >= self.options.max_models:
                raise Refusal(f"{count} models are in training already; end a session, or raise --max-models")
            seed = request.lora_config.seed if request.lora_config else None
            metadata = texts(request.user_metadata)
            self._coming.add(model_id)
            promise = self.promises.add(
                request_id, session.id, mark, lambda: self._create(session, model_id, shape, seed, metadata)
            )
            # not in the work itself, which never begins if its session ends at once
            self.promises.start(promise).add_done_callback(lambda _: self._coming.discard(model_id))
        return {"request_id": request_id, "model_id": model_id}

    async def _create(
        self, session: Session, model_id: str, shape: LoraShape, seed: int | None, metadata: Mapping[str, str] | None
    ) -> Outcome:
        adapted = await self.on_learner(lambda: self.base.adapted(shape, seed))
        if session.id not in self.sessions:
            raise Refusal("the session ended while its model was made")
        trained = TrainedModel(adapted, self.options.micro_batch_tokens)
        queue = RequestQueue(self.promises, self.options.order_wait_s)
        self.models[model_id] = LiveModel(model_id, session, trained, queue, metadata)
        session.models.append(model_id)
        return Outcome.of(type="create_model", model_id=model_id)

    def _shape(self, request: types.CreateModelRequest) -> LoraShape:
        self.check_base(request.base_model)
        lora = request.lora_config
        if lora is None:
            raise Refusal("this server trains LoRA adapters only; give a lora_config")
        if not 1 <= lora.rank <= self.options.rank_limit:
            raise Refusal(f"the rank must be between 1 and {self.options.rank_limit} (--rank-limit), got {lora.rank}")
        if request.optimizer_config.type != "adamw":
            raise Refusal(f'this server has the optimizer "adamw" only, got "{request.optimizer_config.type}"')
        return LoraShape(lora.rank, lora.train_attn, lora.train_mlp, lora.train_unembed)

    def check_base(self, name: str) -> None:
        """Refuse a model that is not the one served."""
        if name.removesuffix("/") not in {known.removesuffix("/") for known in self.base.names}:
            raise Refusal(f'this server has the model "{self.base.name}" only, got "{name[:200]}"')

    def model(self, model_id: str) -> LiveModel:
        """A model that is in training."""
        found = self.models.get(model_id)
        if found is not None:
            found.session.seen = time.monotonic()
            return found
        saved = [n for n in self.store.notes(known_run(model_id)) if n.path.kind == "weights"] if model_id else []
        remedy = f"; resume with create_training_client_from_state_with_optimizer({saved[-1].path})" if saved else ""
        raise Refusal(
            f"the model {model_id[:120]} is not in memory: its session has ended, or the server was restarted{remedy}",
            status=404,
        )

    def unload(self, model_id: str) -> dict[str, Any]:
        model = self.model(model_id)
        request_id = f"{model_id}:unload"

        async def work() -> Outcome:
            self._unload(model_id)
            model.session.models.remove(model_id)
            return Outcome.of(type="unload_model", model_id=model_id)

        promise = self.promises.add(request_id, model.session.id, "", work)
        self.promises.start(promise)
        return {"request_id": request_id, "model_id": model_id}

    def _unload(self, model_id: str) -> None:
        model = self.models.pop(model_id, None)
        if model is not None:
            model.queue.close()
            self.samplers.forget_model(model_id)

    # ---- requests of a model, in their order ------------------------------------------------------------------------

    def forward_backward(self, raw: bytes) -> dict[str, Any]:
        message = peek_train(raw)
        model = self.model(message.model_id)

        def prepare() -> Work:
            request = read_train(message)
            rows = check_rows(request, self.base.model.vocabulary, self.base.max_length)

            async def work() -> Outcome:
                train = model.trained.forward_backward
                found = await self.on_learner(lambda: train(request.loss, rows, request.forward_only))
                return train_outcome(*found)

            return work

        return self._enqueue(model, message.seq_id or None, raw, prepare)

    def optim_step(self, request: types.OptimStepRequest, raw: bytes) -> dict[str, Any]:
        model = self.model(request.model_id)

        def prepare() -> Work:
            params = request.optim_params
            if not isinstance(params, types.AdamParams):
                raise Refusal(f'this server has the optimizer "adamw" only, got "{params.type}"')
            check_adam(params)

            async def work() -> Outcome:
                return Outcome.of(metrics=await self.on_learner(lambda: model.trained.optim_step(params)))

            return work

        return self._enqueue(model, request.seq_id, raw, prepare)

    def save_weights(self, request: types.SaveWeightsRequest, raw: bytes) -> dict[str, Any]:
        model = self.model(request.model_id)

        def prepare() -> Work:
            path = self._new_path(model, "weights", request.path)
            check_ttl(request.ttl_seconds)

            def save() -> None:
                tensors = model.trained.state()
                self.store.write(
                    path, self.base.name, model.shape, tensors, overwrite=request.overwrite, ttl_s=request.ttl_seconds,
                    user_metadata=request.user_metadata, run_metadata=model.metadata,
                )  # fmt: skip

            async def work() -> Outcome:
                await self.on_learner(save)
                self.samplers.forget(str(path))  # it may have replaced one of this name
                return Outcome.of(type="save_weights", path=str(path))

            return work

        return self._enqueue(model, request.seq_id, raw, prepare)

    def save_for_sampler(self, request: types.SaveWeightsForSamplerRequest, raw: bytes) -> dict[str, Any]:
        """With a name, a checkpoint; without one, a snapshot in memory and a sampling session on it."""
        model = self.model(request.model_id)

        def prepare() -> Work:
            check_ttl(request.ttl_seconds)
            if request.path is None and request.sampling_session_seq_id is not None:
                number = request.sampling_session_seq_id
                return lambda: self._snapshot(model, number)
            path = self._new_path(model, "sampler_weights", request.path)

            def save() -> None:
                weights = {"weights": model.trained.state()["weights"]}
                self.store.write(
                    path, self.base.name, model.shape, weights, ttl_s=request.ttl_seconds,
                    user_metadata=request.user_metadata, run_metadata=model.metadata,
                )  # fmt: skip

            async def work() -> Outcome:
                await self.on_learner(save)
                return Outcome.of(type="save_weights_for_sampler", path=str(path))

            return work

        return self._enqueue(model, request.seq_id, raw, prepare)

    async def _snapshot(self, model: LiveModel, number: int) -> Outcome:
        copied = await self.on_learner(model.trained.adapted.model.copy)
        key = f"{model.session.id}:sample:{number}"
        self.samplers.add_snapshot(model.id, key, copied)
        self._add_sampling_session(SamplingSession(key, model.session, key))
        return Outcome.of(type="save_weights_for_sampler", sampling_session_id=key)

    def load_weights(self, request: types.LoadWeightsRequest, raw: bytes) -> dict[str, Any]:
        if request.model_id is None:
            raise Refusal("load_weights needs a model_id; create the model before, with the checkpoint's rank")
        model = self.model(request.model_id)

        def prepare() -> Work:
            path = CheckpointPath.parse(request.path)
            self.check_shape(path, model.shape)

            def load() -> None:
                held = self.store.read(path, request.optimizer)
                model.trained.load(held["weights"], held.get("optimizer"))

            async def work() -> Outcome:
                await self.on_learner(load)
                return Outcome.of(type="load_weights", path=str(path), model_id=model.id)

            return work

        return self._enqueue(model, request.seq_id, raw, prepare)

    def check_shape(self, path: CheckpointPath, shape: LoraShape | None = None) -> None:
        """Refuse a checkpoint that is not there, or of another model or other adapters."""
        note = self.store.note(path)
        self.check_base(note.base_model)
        if shape is not None and note.shape != shape:
            raise Refusal(f"{path} has adapters {note.shape}, and the model has {shape}; create one like it")

    def _new_path(self, model: LiveModel, kind: str, name: str | None) -> CheckpointPath:
        return CheckpointPath(model.id, kind, check_name(name or f"unnamed-{uuid.uuid4().hex[:12]}", "a checkpoint"))

    def _enqueue(self, model: LiveModel, seq_id: int | None, raw: bytes, prepare: Callable[[], Work]) -> dict[str, Any]:
        number = model.queue.next_free if seq_id is None else seq_id
        request_id, mark = f"{model.id}:{number}", digest(raw)
        if self.promises.find(request_id, mark) is None:
            try:
                work = prepare()
            except Exception:
                with suppress(Refusal):
                    model.queue.add(number, None)
                raise
            model.queue.check(number)
            model.queue.add(number, self.promises.add(request_id, model.session.id, mark, work))
        return {"request_id": request_id, "model_id": model.id}

    # ---- sampling sessions ----------------------------------------------------------------------------------------

    def create_sampling_session(self, request: types.CreateSamplingSessionRequest) -> dict[str, Any]:
        session = self.session(request.session_id)
        key = self.sampler_key(request.base_model, request.model_path)
        sampler_id = f"{session.id}:sample:{request.sampling_session_seq_id}"
        known = self.sampling.get(sampler_id)
        if known is not None and known.key != key:
            raise Refusal(f"sampling_session_seq_id {request.sampling_session_seq_id} is in use; count on")
        self._add_sampling_session(SamplingSession(sampler_id, session, key))
        return {"type": "create_sampling_session", "sampling_session_id": sampler_id}

    def sampler_key(self, base_model: str | None, model_path: str | None) -> str:
        """The key of the weights that a request names; refused if there are none such."""
        if base_model is not None:
            self.check_base(base_model)
        if model_path is not None:
            path = CheckpointPath.parse(model_path)
            self.check_shape(path)
            return str(path)
        if base_model is None:
            raise Refusal("name what to sample from: model_path or base_model")
        return BASE

    def sampling_session(self, sampler_id: str) -> SamplingSession:
        found = self.sampling.get(sampler_id)
        if found is None:
            raise Refusal(
                f"there is no sampling session {sampler_id[:120]}: its session has ended, or the server was restarted; "
                "create a new one from a model_path",
                status=404,
            )
        found.session.seen = time.monotonic()
        return found

    def _add_sampling_session(self, sampling: SamplingSession) -> None:
        if sampling.id not in self.sampling:
            sampling.session.samplers.append(sampling.id)
            for oldest in sampling.session.samplers[:-_SAMPLERS]:
                sampling.session.samplers.remove(oldest)
                del self.sampling[oldest]
        self.sampling[sampling.id] = sampling
