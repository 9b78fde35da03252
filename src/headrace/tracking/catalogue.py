"""The catalogue of metrics: every key that Headrace records, with its unit, its reducer and its meaning.

`MetricsAggregator` takes the reducer of a key from here, and the tables of docs/metrics.md are made from here
(`scripts/docs_tables.py`). In keys, `<name>` stands for any text. What users record has areas of its own:
`episode/<name>` (workflows and judgers), `loss/<name>` (losses) and `eval/<set>/<name>` (evaluation metrics).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

from headrace.errors import DataError


class Reducer(StrEnum):
    """How the values of one metric become one number."""

    SUM = "sum"
    MEAN = "mean"
    LAST = "last"
    MIN = "min"
    MAX = "max"
    WEIGHTED_MEAN = "weighted_mean"

    @classmethod
    def _missing_(cls, value: object) -> Reducer:
        raise DataError(f'unknown reducer "{value}"; use one of {", ".join(cls)}')


@dataclass(frozen=True, slots=True)
class Metric:
    """One key, or a family of keys: `reward/<role>/mean`."""

    key: str
    unit: str
    reducer: Reducer
    meaning: str


_SUM, _MEAN, _LAST, _MAX, _WEIGHTED = Reducer.SUM, Reducer.MEAN, Reducer.LAST, Reducer.MAX, Reducer.WEIGHTED_MEAN

SECTIONS: dict[str, tuple[Metric, ...]] = {
    "Rewards and responses": (
        Metric("reward/mean", "reward", _MEAN, "over the trajectories that are trained; only of sampled ones"),
        Metric("reward/std", "reward", _MEAN, "standard deviation of the same rewards"),
        Metric(
            "reward/before_filters/mean",
            "reward",
            _LAST,
            "over all groups completed since the last step, also those that filters dropped; with filters, this shows "
            "whether the policy improves",
        ),
        Metric("reward/uniform_groups", "share", _MEAN, "groups whose rewards are all equal"),
        Metric("reward/<role>/mean", "reward", _MEAN, "of one role, if there are several"),
        Metric(
            "reward/kl_to_reference",
            "nats",
            _MEAN,
            'divergence by `algorithm.kl`, with `where = "reward"`: sum over the tokens of a trajectory',
        ),
        Metric("response/length_mean", "tokens", _MEAN, "response tokens per episode, of demonstrations too"),
        Metric("response/cut_share", "share", _MEAN, "episodes that ended by a token limit"),
    ),
    "Episodes": (
        Metric(
            "episodes/dispatched",
            "episodes",
            _LAST,
            "started since the run began: the sum of the next five",
        ),
        Metric("episodes/trained", "episodes", _LAST, "episodes that were trained"),
        Metric("episodes/filtered", "episodes", _LAST, "episodes that a filter dropped"),
        Metric("episodes/failed", "episodes", _LAST, "episodes that failed"),
        Metric("episodes/stale", "episodes", _LAST, "dropped by the staleness policy `drop`"),
        Metric("episodes/pending", "episodes", _LAST, "running, or waiting to be trained"),
        Metric(
            "episodes/restarted",
            "episodes",
            _LAST,
            "started again: the infrastructure failed, or after a crash the workflow did not repeat what is recorded",
        ),
        Metric("episodes/reused", "episodes", _SUM, "of this step that were trained before (`produce.reuse`)"),
        Metric("batch/failed", "episodes", _SUM, "failed ones in the groups of this step, if there are any"),
        Metric(
            "judge/failed",
            "calls",
            _LAST,
            "judge calls that failed since the process began, and with them their episodes",
        ),
        Metric(
            "user_code/abandoned",
            "calls",
            _LAST,
            "calls of your code that did not stop when they were cancelled, if any",
        ),
    ),
    "Tokens and time": (
        Metric("batch/rows", "rows", _SUM, "training rows"),
        Metric("batch/tokens", "tokens", _SUM, "all tokens of these rows, prompts too"),
        Metric("tokens/generated", "tokens", _SUM, "sampled tokens of the episodes; 0 for demonstrations"),
        Metric(
            "tokens/generated_per_s",
            "tokens/s",
            _LAST,
            "per second of `time/generate_s`; of `time/step_s` where the engine generates while the learner trains",
        ),
        Metric("tokens/trained", "tokens", _SUM, "tokens that the loss counts, without those of rejected rows"),
        Metric("tokens/trained_per_s", "tokens/s", _LAST, "per second of `time/train_s`"),
        Metric("time/step_s", "s", _LAST, "the complete step, without evaluation and saving"),
        Metric("time/train_s", "s", _LAST, "advantages, forward, backward, optimizer, weight sync"),
        Metric("time/generate_s", "s", _LAST, "waiting for episodes: `time/step_s` without `time/train_s`"),
        Metric("time/judge_s", "s", _LAST, "mean of a judge call since the process began"),
        Metric("time/group_s/count", "groups", _LAST, "completed since the last step"),
        Metric(
            "time/group_s/mean",
            "s",
            _LAST,
            "from the start of these groups to their end; [`headrace simulate`](staleness.md#simulating) reads it",
        ),
        Metric("time/group_s/q<percent>", "s", _LAST, "quantiles of the same"),
        Metric(
            "time/group_s/token_place",
            "share",
            _LAST,
            "where in a group's duration its tokens were sampled: 0.5, unless groups wait for tools or a slot",
        ),
        Metric(
            "time/group_s/long_token_place",
            "share",
            _LAST,
            "the same of groups over twice the median duration",
        ),
        Metric("utilisation/learner", "share", _LAST, "of `time/step_s` in which the learner trained"),
        Metric("utilisation/engine", "share", _LAST, "of `time/step_s` in which the engine computed"),
        Metric("engine/serving", "replicas", _LAST, "of a pool that take requests now"),
        Metric("engine/restarts", "restarts", _LAST, "of replicas that were lost, so far"),
        Metric("engine/reissued", "requests", _LAST, "of lost replicas that were issued again, same seeds, so far"),
        Metric("engine/replica/<n>/requests", "requests", _LAST, "that a replica has at the end of the step"),
        Metric("engine/replica/<n>/tokens", "tokens", _LAST, "that a replica has sampled so far"),
        Metric("engine/replica/<n>/restarts", "restarts", _LAST, "of one replica, so far"),
        Metric("memory/generate_peak_mb", "MB", _MAX, "resident, peak while generating (`trainer.release_cache`)"),
        Metric("memory/device_generate_peak_mb", "MB", _MAX, "on the accelerator, peak while generating"),
        Metric("memory/device_train_peak_mb", "MB", _MAX, "on the accelerator, peak while training"),
        Metric("memory/train_peak_mb", "MB", _MAX, "resident, peak while training (`trainer.release_cache`)"),
    ),
    "Staleness, bias, curriculum": (
        Metric("staleness/max", "versions", _MAX, "between sampling and training, of the oldest trained token"),
        Metric("staleness/mean", "versions", _MEAN, "between sampling and training, over trained tokens"),
        Metric("staleness/overage_rows", "rows", _SUM, "rows with tokens older than `trainer.max_staleness`"),
        Metric(
            "staleness/masked_tokens", "tokens", _SUM, "of these rows, tokens that the [policy](staleness.md) left out"
        ),
        Metric("staleness/divergence_bound", "nats", _LAST, "`trust`: the largest divergence that is trained"),
        Metric("staleness/divergence_old", "nats", _MEAN, "`trust`: divergence of older rows"),
        Metric("bias/length", "ratio", _LAST, "mean response tokens, trained to submitted, over the run; 1 is no bias"),
        Metric("bias/duration", "ratio", _LAST, "mean duration, trained to submitted"),
        Metric("bias/source/<source>", "ratio", _LAST, "share of a source, trained to submitted, if there are several"),
        Metric(
            "curriculum/passed_over",
            "share",
            _LAST,
            "tasks that the [curriculum](data.md#curriculum) passed over since the last step",
        ),
        Metric("curriculum/known", "tasks", _LAST, "success rates that it knows"),
        Metric("curriculum/rate", "share", _LAST, "mean of these rates"),
    ),
    "Sampler against learner": (
        Metric(
            "drift/same_version",
            "nats",
            _WEIGHTED,
            "mean absolute difference of the sampler's and the learner's log-probabilities, on rows of the current "
            "version: rounding, unless weights did not arrive or `engine.weights` has fewer bits",
        ),
        Metric("drift/same_version_max", "nats", _MAX, "the largest of these differences"),
        Metric(
            "drift/of/<engine>/<dtype>",
            "nats",
            _WEIGHTED,
            "`drift/same_version` under the names of engine and type of weights, to compare runs by",
        ),
        Metric(
            "drift/surprise",
            "nats",
            _WEIGHTED,
            "−log policy − entropy, on the same rows: 0 on average if tokens are drawn from the distribution that the "
            "engine states; filters that drop groups shift it",
        ),
        Metric("drift/stale", "nats", _WEIGHTED, "the same mean on rows with older tokens: the policy has moved"),
        Metric(
            "policy/kl_to_sampler",
            "nats",
            _WEIGHTED,
            "log sampler − log policy at the sampled tokens; near 0 when on-policy",
        ),
        Metric("policy/logprob_gap_max", "nats", _MAX, "largest absolute difference of the two"),
    ),
    "Policy": (
        Metric(
            "policy/loss",
            "",
            _WEIGHTED,
            "over the trained tokens, whatever `algorithm.aggregation` is; of DPO see `dpo/loss`",
        ),
        Metric("policy/entropy", "nats", _WEIGHTED, "entropy of the policy at the trained tokens"),
        Metric("policy/grad_norm", "", _LAST, "norm of the gradient, before clipping"),
        Metric(
            "policy/kl_to_reference",
            "nats",
            _WEIGHTED,
            'divergence by `algorithm.kl`, with `where = "loss"`, per token',
        ),
        Metric("policy/ratio_mean", "ratio", _WEIGHTED, "ratio of the loss, if it has one"),
        Metric("policy/clip_fraction", "share", _WEIGHTED, "tokens with a clipped ratio (`ppo_clip`, `gspo`, `cispo`)"),
        Metric("policy/dropped_fraction", "share", _WEIGHTED, "tokens that are dropped (`dppo_tv`, `dppo_kl`)"),
        Metric("policy/correction_mean", "ratio", _WEIGHTED, "weight of the correction"),
        Metric(
            "policy/masked_fraction",
            "share",
            _WEIGHTED,
            "tokens that the correction masks (`icepop`, `sequence_mask`, `veto`)",
        ),
        Metric("value/loss", "", _WEIGHTED, "squared error of the value head, halved (`gae`)"),
        Metric("optim/lr", "", _LAST, "learning rate"),
    ),
    "Preferences and demonstrations": (
        Metric("dpo/pairs", "pairs", _SUM, "trained"),
        Metric(
            "dpo/skipped/<reason>",
            "groups",
            _SUM,
            "without a pair: `fewer_than_two`, `multi_step`, `tie`, `small_gap`, `different_prompts`",
        ),
        Metric("dpo/loss", "", _WEIGHTED, "per pair; ln 2 while policy and reference are the same"),
        Metric("dpo/accuracy", "share", _WEIGHTED, "pairs whose chosen reply gained more on the reference"),
        Metric("dpo/margin", "", _WEIGHTED, "chosen minus rejected reward"),
        Metric("dpo/chosen_reward", "", _WEIGHTED, "β times the log-ratio to the reference, of the chosen reply"),
        Metric("dpo/rejected_reward", "", _WEIGHTED, "the same of the rejected reply"),
        Metric(
            "sft/loss",
            "",
            _WEIGHTED,
            "of the demonstrations that [`[sft]`](algorithms.md#supervised-fine-tuning) adds; not in `policy/*`",
        ),
        Metric("sft/entropy", "nats", _WEIGHTED, "at the tokens of these demonstrations"),
    ),
    "Evaluation": (
        Metric("eval/step", "steps", _LAST, "the step whose weights were evaluated"),
        Metric("eval/<set>/pass@<k>", "share", _LAST, "see [evaluation](evaluation.md)"),
        Metric("eval/<set>/avg@<n>", "share", _LAST, "attempts that are right"),
        Metric("eval/<set>/pass@1_low", "share", _LAST, "lower end of the 95% interval of pass@1"),
        Metric("eval/<set>/pass@1_high", "share", _LAST, "upper end"),
        Metric("eval/<set>/tasks", "tasks", _LAST, "in the set"),
        Metric("eval/<set>/failed", "episodes", _LAST, "that failed"),
        Metric("eval/<set>/reward", "reward", _LAST, "mean over episodes"),
        Metric("eval/<set>/response_tokens", "tokens", _LAST, "mean over episodes"),
        Metric("eval/<set>/<source>/<metric>", "", _LAST, "each of these per source, if the set has several"),
    ),
    "Your own": (
        Metric(
            "episode/<name>",
            "",
            _MEAN,
            "what workflows and judgers put into an episode's `metrics`; `diverged_prefixes` counts "
            "[changed histories](workflows.md#several-turns)",
        ),
        Metric("loss/<name>", "", _WEIGHTED, "what a [loss of your own](algorithms.md#your-own-loss) returns"),
        Metric(
            "eval/<set>/<name>", "", _LAST, "what an [evaluation metric of your own](evaluation.md#your-own) returns"
        ),
    ),
}
"""All metrics, under the headings of docs/metrics.md."""

CATALOGUE: tuple[Metric, ...] = tuple(metric for section in SECTIONS.values() for metric in section)

strict = False
"""Whether a key or a reducer that is not the catalogue's is refused. Tests set it. In a run, code of users may record
what it likes, if it names the reducer."""

_EXACT = {metric.key: metric for metric in CATALOGUE if "<" not in metric.key}
_NUMBERS = ("<k>", "<n>", "<percent>")


def _pattern(key: str) -> re.Pattern[str]:
    return re.compile(
        "".join(
            r"\d+" if part in _NUMBERS else ".+" if part.startswith("<") else re.escape(part)
            for part in re.split(r"(<\w+>)", key)
        )
    )


_FAMILIES = [(_pattern(metric.key), metric) for metric in CATALOGUE if "<" in metric.key]


@lru_cache(maxsize=4096)
def find(key: str) -> Metric | None:
    """The metric that `key` is one of; None if the catalogue has none."""
    return _EXACT.get(key) or next((metric for pattern, metric in _FAMILIES if pattern.fullmatch(key)), None)


def reducer_of(key: str, given: Reducer | None = None) -> Reducer:
    """The reducer of a key: the catalogue's, or what a user's code gives."""
    metric = find(key)
    if given is not None and not strict:
        return Reducer(given)
    if metric is None:
        raise DataError(
            f'metric "{key}" is not in the catalogue (tracking/catalogue.py); add it there, or name it episode/…, '
            f"loss/… or eval/SET/… if it is a user's own"
        )
    if given is not None and Reducer(given) is not metric.reducer:
        raise DataError(
            f'metric "{key}" is recorded with reducer "{Reducer(given)}", and in the catalogue it has '
            f'"{metric.reducer}"; leave the reducer out, or choose another key'
        )
    return metric.reducer
