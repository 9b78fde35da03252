"""Completions of plain text or ids, without a chat template, recorded like any other call."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from headrace.agents.completer import Model
from headrace.data.episode import ModelOutput, OwnedMessages, Step


async def complete(model: Model, prompt: str | tuple[int, ...], role: str, **sampling: Any) -> ModelOutput:
    """What the model goes on with. A prompt that begins with an earlier one and its reply keeps their exact ids."""
    params = replace(model._sampling, **sampling) if sampling else model._sampling
    answered = model._answered.setdefault(role, {})
    prompt_ids = _prompt_ids(model, answered, prompt)
    # a role that no conversation has, so that none is ever taken to go on from here
    history = OwnedMessages(({"role": "prompt", "content": prompt if isinstance(prompt, str) else list(prompt)},))
    params = model.spending.take_turn(params)
    call, model._calls = model._calls, model._calls + 1
    answered[call] = None
    try:
        output = await model._answer(prompt_ids, params, call, role, history, ())
    except BaseException:
        del answered[call]
        raise
    finally:
        model.spending.end_turn(params)
    model.spending.sampled(output, params)
    answered[call] = (output, Step.from_model_output(output, history))
    return output


def _prompt_ids(model: Model, answered: Any, prompt: str | tuple[int, ...]) -> tuple[int, ...]:
    if not isinstance(prompt, str):
        return prompt
    best: tuple[str, ModelOutput] | None = None
    for output, step in (pair for pair in answered.values() if pair is not None):
        before = step.messages[0]["content"] if step.messages[0]["role"] == "prompt" else None
        so_far = before + output.text if isinstance(before, str) else None
        if so_far is not None and prompt.startswith(so_far) and (best is None or len(so_far) > len(best[0])):
            best = so_far, output
    if best is None:
        return model._template.encode(prompt)
    so_far, output = best
    ids = (*output.prompt_ids, *output.completion_ids)
    return (*ids, *model._template.encode(prompt[len(so_far) :]))
