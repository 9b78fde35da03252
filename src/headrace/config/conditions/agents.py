"""When the settings of agents, engines and judgers have effect."""

from __future__ import annotations

from headrace.config.conditions.shared import ONE_CALL
from headrace.config.derived import (
    has_own,
    is_judged,
    longest_reply,
    on_servers,
    places_engines,
    shares_bundles,
    uses_workflow,
    varies,
)
from headrace.config.effect import Condition
from headrace.registry import builtin

_SEVERAL_CALLS = tuple(builtin("workflow").keys() - ONE_CALL)
USES_WORKFLOW = Condition(
    lambda s: s.c.algorithm.objective != "sft" or bool(s.c.eval.sets),
    "objective sft trains on the tasks' own messages, and there is no evaluation set",
    "remove it, or add a section [eval.sets.NAME]",
)
NOT_ON_SERVERS = Condition(
    lambda s: not on_servers(s.c),
    'engine "{c.engine.name}" leaves it to its servers',
    "remove it, or set engine.server_args",
)
SEVERAL_ENGINES = Condition(
    lambda s: s.c.backend.name != "tinker",
    'backend "tinker" samples on the service',
    "remove it, or change backend.name",
)
STARTS_SERVERS = Condition(
    lambda s: not s.own.urls, "engine.urls names servers that run already", "remove one of the two"
)
SERVERS_HERE = Condition(
    lambda s: not (places_engines(s.c) or shares_bundles(s.c)),
    "Ray gives each server the GPUs of its bundle",
    "remove it, and set cluster.engine.GPU",
)
GIVEN_SERVERS = Condition(
    lambda s: bool(s.own.urls), "Headrace starts the servers, on loopback", "remove it, or set engine.urls"
)
PARTIAL = Condition(
    lambda s: s.c.trainer.partial_rollouts or varies(s.c, "trainer.partial_rollouts"),
    "trainer.partial_rollouts is false, so no sequence is in flight at a weight sync",
    "remove one of the two",
)
TINKER_SEGMENTS = Condition(
    lambda s: s.c.backend.name != "tinker" or s.c.tinker.segment_tokens is not None,
    "one request per reply ends under the weights it began with",
    "remove it, or set tinker.segment_tokens",
)
SEPARATE = Condition(
    lambda s: s.c.trainer.placement == "separate" or on_servers(s.c) or has_own({s.c.backend.name}, "backend"),
    "a colocated engine shares the learner's threads",
    'set backend.threads, or trainer.placement = "separate"',
)
NAMED_JUDGER = Condition(lambda s: bool(s.c.workflow.judger), "workflow.judger is empty", "set workflow.judger, too")
JUDGED = Condition(
    lambda s: is_judged(s.c),
    "there is no judger",
    "remove it, or set workflow.judger or judge.routes",
)
JUDGED_ON_RAY = Condition(
    lambda s: s.own.placement == "ray",
    'judge.placement is "local"',
    'remove it, or set judge.placement = "ray"',
)
SEVERAL_TURNS = Condition(
    lambda s: uses_workflow(s.c, *_SEVERAL_CALLS),
    'workflow "{c.workflow.name}" makes one model call per episode',
)
BELOW_ONE_REPLY = Condition(
    lambda s: uses_workflow(s.c, *_SEVERAL_CALLS) or s.own.max_episode_tokens <= longest_reply(s.c),
    'workflow "{c.workflow.name}" makes one model call per episode, of at most rollout.max_tokens = '
    "{own.max_tokens} tokens",
)
COMPARES_STEPS = Condition(
    lambda s: s.own.grouping != "by_step" or s.own.name not in ONE_CALL,
    'an episode of workflow "{c.workflow.name}" has one step, so its steps are compared anyway',
)
TOOLS = Condition(lambda s: uses_workflow(s.c, "tool_agent"), 'workflow "{c.workflow.name}" calls no tools')
GATEWAY = Condition(lambda s: uses_workflow(s.c, "external_agent"), 'workflow "{c.workflow.name}" opens no gateway')
NOT_DETERMINISTIC = Condition(
    lambda s: not s.c.run.deterministic or not s.own.kept_tokens,
    "run.deterministic keeps none",
    "remove it, or unset run.deterministic",
)
TOGETHER = Condition(
    lambda s: not s.c.run.deterministic or not s.own.compile,
    "run.deterministic decodes one sequence at a time, with what is not compiled",
    "remove it, or unset run.deterministic",
)
