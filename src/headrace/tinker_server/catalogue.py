"""Questions about models, samplers, sessions, runs and checkpoints, and what is done to checkpoints."""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from starlette.requests import Request

from headrace.tinker_server.checkpoint_store import CheckpointPath, Note, check_name, moment
from headrace.tinker_server.checks import check_ttl
from headrace.tinker_server.options import Refusal
from headrace.tinker_server.sampler_cache import BASE
from headrace.tinker_server.service import LiveModel, Service

Answer = Callable[[Request, bytes], Awaitable[Any]]
_RUN, _CHECKPOINT = "training_runs/{run}", "training_runs/{run}/checkpoints/{kind}/{name}"


class Catalogue:
    """Answers that change nothing in training."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def routes(self) -> list[tuple[str, str, Answer]]:
        return [
            ("GET", "training_runs", self._runs),
            ("GET", _RUN, self._run),
            ("GET", f"{_RUN}/checkpoints", self._checkpoints_of_run),
            ("DELETE", _CHECKPOINT, self._delete),
            ("PUT", f"{_CHECKPOINT}/ttl", self._ttl),
            ("GET", "checkpoints", self._checkpoints),
            ("GET", "samplers/{sampler}", self._sampler),
            ("GET", "sessions", self._sessions),
            ("GET", "sessions/{session}", self._session),
            ("POST", "sessions/{session}/finish", self._finish),
        ]

    def capabilities(self) -> dict[str, Any]:
        base = self._service.base
        model = {"model_name": base.name, "max_context_length": base.max_length, "trainable": True, "sampleable": True}
        return {"supported_models": [model]}

    def info(self, model_id: str) -> dict[str, Any]:
        model, base = self._service.model(model_id), self._service.base
        data = {"arch": base.architecture, "model_name": base.name, "tokenizer_id": base.tokenizer_id}
        return {
            "type": "get_info",
            "model_data": data,
            "model_id": model.id,
            "is_lora": True,
            "lora_rank": model.shape.rank,
            "model_name": base.name,
        }

    def weights_info(self, tinker_path: str) -> dict[str, Any]:
        note = self._service.store.note(CheckpointPath.parse(tinker_path))
        shape = note.shape
        return {
            "base_model": note.base_model,
            "is_lora": True,
            "lora_rank": shape.rank,
            "train_unembed": shape.train_unembed,
            "train_mlp": shape.train_mlp,
            "train_attn": shape.train_attn,
        }

    async def _runs(self, request: Request, raw: bytes) -> Any:
        saved: dict[str, list[Note]] = {run: [] for run in self._service.models}
        for note in self._service.store.notes():
            saved.setdefault(note.path.run, []).append(note)
        runs = [self._describe(run, self._service.models.get(run), notes) for run, notes in saved.items()]
        runs.reverse()  # the newest first
        page, cursor = _page(request, runs)
        return {"training_runs": page, "cursor": cursor}

    async def _run(self, request: Request, raw: bytes) -> Any:
        run = check_name(request.path_params["run"], "a run")
        live, notes = self._service.models.get(run), self._service.store.notes(run)
        if live is None and not notes:
            raise Refusal(f"there is no training run {run}", status=404)
        return self._describe(run, live, notes)

    def _describe(self, run: str, live: LiveModel | None, notes: Sequence[Note]) -> dict[str, Any]:
        last = {note.path.kind: note.as_api() for note in notes}
        shape = live.shape if live is not None else notes[-1].shape
        metadata = live.metadata if live is not None else notes[-1].run_metadata
        return {
            "training_run_id": run,
            "base_model": self._service.base.name if live is not None else notes[-1].base_model,
            "model_owner": "local",
            "is_lora": True,
            "lora_rank": shape.rank,
            "last_request_time": moment(time.time() if live is not None else notes[-1].created),
            "last_checkpoint": last.get("weights"),
            "last_sampler_checkpoint": last.get("sampler_weights"),
            "user_metadata": metadata,
        }

    async def _checkpoints_of_run(self, request: Request, raw: bytes) -> Any:
        run = check_name(request.path_params["run"], "a run")
        return {"checkpoints": [note.as_api() for note in self._service.store.notes(run)]}

    async def _checkpoints(self, request: Request, raw: bytes) -> Any:
        page, cursor = _page(request, [note.as_api() for note in reversed(self._service.store.notes())])
        return {"checkpoints": page, "cursor": cursor}

    async def _delete(self, request: Request, raw: bytes) -> None:
        path = _path(request)
        self._service.store.delete(path)
        self._service.samplers.forget(str(path))

    async def _ttl(self, request: Request, raw: bytes) -> None:
        try:
            ttl_s = json.loads(raw)["ttl_seconds"]
        except (ValueError, KeyError, TypeError):
            ttl_s = False
        if ttl_s is not None and (isinstance(ttl_s, bool) or not isinstance(ttl_s, int)):
            raise Refusal("ttl_seconds must be a number of seconds, or null to keep the checkpoint for good")
        check_ttl(ttl_s, shortest=1)
        self._service.store.expire(_path(request), ttl_s)

    async def _sampler(self, request: Request, raw: bytes) -> Any:
        sampling = self._service.sampling_session(request.path_params["sampler"])
        path = sampling.key if sampling.key.startswith("tinker://") else None
        assert path or sampling.key == BASE or sampling.key == sampling.id
        # the SDK loads the tokenizer by this name
        return {"sampler_id": sampling.id, "base_model": self._service.base.tokenizer_id, "model_path": path}

    async def _sessions(self, request: Request, raw: bytes) -> Any:
        page, _ = _page(request, list(self._service.sessions))
        return {"sessions": page}

    async def _session(self, request: Request, raw: bytes) -> Any:
        session = self._service.session(request.path_params["session"])
        return {
            "training_run_ids": session.models,
            "sampler_ids": session.samplers,
            "user_metadata": session.user_metadata,
            "display_name": session.display_name,
        }

    async def _finish(self, request: Request, raw: bytes) -> None:
        self._service.session(request.path_params["session"])
        self._service.end_session(request.path_params["session"])


def _path(request: Request) -> CheckpointPath:
    held = request.path_params
    return CheckpointPath.parse(f"tinker://{held['run']}/{held['kind']}/{held['name']}")


def _page(request: Request, everything: Sequence[Any]) -> tuple[list[Any], dict[str, int]]:
    try:
        limit, offset = (int(request.query_params.get(name, usual)) for name, usual in (("limit", 100), ("offset", 0)))
    except ValueError:
        limit = offset = -1
    if limit < 0 or offset < 0:
        raise Refusal("limit and offset must be whole numbers from 0 on")
    return list(everything[offset : offset + limit]), {"offset": offset, "limit": limit, "total_count": len(everything)}
