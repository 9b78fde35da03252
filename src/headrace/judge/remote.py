"""A judger behind a URL: it gets task and episode as JSON, and answers with a reward."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from headrace.data.episode import Episode
from headrace.data.task import Task
from headrace.errors import RefusedError, WorkflowError
from headrace.judge.base import Judger, Verdict
from headrace.ledger.export import plain
from headrace.registry import load_object

_SHOWN = 200


class RemoteJudger(Judger):
    """Posts `{"task": …, "episode": …}`; wants `{"reward": number, "is_correct": true | false | null, "metrics": {…}}`.

    Failures of connection and server are tried again, then the episode is. An answer of another form is a failure of
    the judger, which says nothing about the episode. With `tokens` false, the ids and log-probabilities stay here.
    """

    def __init__(
        self,
        url: str,
        api_key_env: str | None = None,
        timeout_s: float = 60.0,
        retries: int = 4,
        max_concurrent: int = 64,
        tokens: bool = False,
    ) -> None:
        self._url = url
        self._tokens = tokens
        self._http: Any = load_object("headrace.engines.http:HttpJson")(api_key_env, timeout_s, retries, max_concurrent)

    async def judge(self, task: Task, episode: Episode) -> Verdict:
        """Ask."""
        payload = {"task": plain(task.to_dict()), "episode": self._told(episode)}
        try:
            answer = await self._http.post(self._url, payload)
        except RefusedError as error:
            raise WorkflowError(
                f"the judger at {self._url} failed: {error}; it answered {error.body[:_SHOWN]!r}"
            ) from error
        return self._verdict(answer)

    async def close(self) -> None:
        """Let connections go."""
        await self._http.close()

    def _told(self, episode: Episode) -> dict[str, Any]:
        sent = plain(episode.to_dict())
        if not self._tokens:
            for trajectory in sent["trajectories"]:
                for step in trajectory["steps"]:
                    for name in ("prompt_ids", "response_ids", "logprobs", "versions", "advantage"):
                        del step[name]
        return {**sent, "text": episode.text}

    def _verdict(self, answer: Any) -> Verdict:
        if not isinstance(answer, dict) or not _is_finite(answer.get("reward")):
            raise self._bad(answer, 'wants an object with a finite number "reward"')
        correct, metrics = answer.get("is_correct"), answer.get("metrics") or {}
        if not (correct is None or isinstance(correct, bool)):
            raise self._bad(answer, '"is_correct" must be true, false or null')
        if not isinstance(metrics, Mapping) or not all(_is_finite(value) for value in metrics.values()):
            raise self._bad(answer, '"metrics" must be an object of finite numbers')
        return Verdict(float(answer["reward"]), correct, {str(name): float(value) for name, value in metrics.items()})

    def _bad(self, answer: Any, wanted: str) -> WorkflowError:
        return WorkflowError(f"the judger at {self._url}: {wanted}, got {str(answer)[:_SHOWN]}")


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
