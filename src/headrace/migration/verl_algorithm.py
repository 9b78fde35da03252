"""The algorithm of a verl configuration: estimator, loss, divergence and correction."""

from __future__ import annotations

from headrace.migration.carry import Carry

_ACTOR = "actor_rollout_ref.actor"
ESTIMATORS = {
    "grpo": "grpo",
    "grpo_vectorized": "grpo",
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
    "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline",
    "opo": "opo",
    "gae": "gae",
}
LOSSES = {"vanilla": "ppo_clip", "gspo": "gspo", "cispo": "cispo", "dppo_tv": "dppo_tv", "dppo_kl": "dppo_kl"}
_AGGREGATIONS = {
    "token-mean": "token_mean",
    "token-sum": "token_sum",
    "seq-mean-token-sum": "sequence_mean_token_sum",
    "seq-mean-token-mean": "sequence_mean_token_mean",
    "seq-mean-token-sum-norm": "constant",
}
_DIVERGENCES = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}


def carry_estimator(carry: Carry) -> None:
    known = carry.one_of("algorithm.adv_estimator", "algorithm.estimator", ESTIMATORS, "estimator")
    chosen = carry.values.get("algorithm.estimator")
    if known and chosen == "grpo":
        by_std = bool(carry.get("algorithm.norm_adv_by_std_in_grpo", True))
        carry.put("algorithm.norm_adv_by_std_in_grpo", "algorithm.normalize_by_std", by_std)
    else:
        carry.idle("algorithm.norm_adv_by_std_in_grpo", "it is for grpo")
    if chosen == "gae":
        carry.values["algorithm.value_head"] = True
        carry.put("algorithm.gamma", "algorithm.gamma", float(carry.get("algorithm.gamma", 1.0)))
        carry.put("algorithm.lam", "algorithm.gae_lambda", float(carry.get("algorithm.lam", 1.0)))
        for key in carry.given:
            if key.startswith("critic.") and not key.endswith("_target_"):
                carry.lose(key, "the value head is on the policy's own hidden states; algorithm.value_coef weighs it")
    else:
        for key in carry.given:
            if key.startswith("critic.") or key in ("algorithm.gamma", "algorithm.lam", "trainer.critic_warmup"):
                carry.idle(key, "no critic: it is for estimator gae")
    drops = bool(carry.get("algorithm.filter_groups.enable", False))
    carry.put("algorithm.filter_groups.enable", "filters.drop_uniform", drops)
    for name in ("metric", "max_num_gen_batches", "max_inflight_gen_batches"):
        if drops:
            carry.lose(f"algorithm.filter_groups.{name}", "rewards decide, and filters.most_replacements is the limit")
        else:
            carry.idle(f"algorithm.filter_groups.{name}", "no groups are filtered")


def carry_loss(carry: Carry) -> None:
    key = f"{_ACTOR}.policy_loss.loss_mode"
    carry.one_of(key, "algorithm.loss", LOSSES, "loss")
    loss = carry.values.get("algorithm.loss")
    if loss is None:
        for name in (name for name in carry.given if name.startswith((f"{_ACTOR}.policy_loss.", f"{_ACTOR}.tau_"))):
            carry.lose(name, "a setting of a loss that is not there")
    both = carry.get(f"{_ACTOR}.clip_ratio", 0.2)
    if loss in ("ppo_clip", "gspo", "cispo"):
        for side in ("low", "high"):
            value = float(carry.get(f"{_ACTOR}.clip_ratio_{side}", both))
            carry.put(f"{_ACTOR}.clip_ratio_{side}", f"algorithm.clip_{side}", value)
        carry.idle(f"{_ACTOR}.clip_ratio", "clip_ratio_low and clip_ratio_high decide")
    if loss == "ppo_clip":
        carry.put(f"{_ACTOR}.clip_ratio_c", "algorithm.dual_clip", float(carry.get(f"{_ACTOR}.clip_ratio_c", 3.0)))
    else:
        carry.idle(f"{_ACTOR}.clip_ratio_c", "it is for loss vanilla")
    if carry.one_of(f"{_ACTOR}.loss_agg_mode", "algorithm.aggregation", _AGGREGATIONS, "aggregation"):
        length = carry.get(f"{_ACTOR}.loss_scale_factor")
        if carry.values["algorithm.aggregation"] == "constant":
            length = int(length or carry.values["rollout.max_tokens"])
            carry.put(f"{_ACTOR}.loss_scale_factor", "algorithm.aggregation_length", length)
            carry.values["algorithm.aggregation_length"] = length
    carry.put(f"{_ACTOR}.entropy_coeff", "algorithm.entropy_coef", float(carry.get(f"{_ACTOR}.entropy_coeff", 0)))


def carry_divergence(carry: Carry) -> None:
    in_loss, in_reward = carry.get(f"{_ACTOR}.use_kl_loss", False), carry.get("algorithm.use_kl_in_reward", False)
    loss = (f"{_ACTOR}.use_kl_loss", f"{_ACTOR}.kl_loss_coef", f"{_ACTOR}.kl_loss_type", "loss")
    reward = ("algorithm.use_kl_in_reward", "algorithm.kl_ctrl.kl_coef", "algorithm.kl_penalty", "reward")
    for (switch, coef, kind, where), on in ((loss, in_loss), (reward, in_reward and not in_loss)):
        if not on:
            for key in (switch, coef, kind):
                carry.idle(key, f"no divergence in the {where}")
            continue
        carry.part_of(switch, "algorithm.kl.where")
        carry.values["algorithm.kl.where"] = where
        carry.put(coef, "algorithm.kl.coef", float(carry.get(coef, 0.001)))
        name = str(carry.get(kind, "low_var_kl"))
        if name in _DIVERGENCES:
            carry.put(kind, "algorithm.kl.kind", _DIVERGENCES[name])
        else:
            carry.lose(kind, "the divergences are k1, k2, k3 and abs")
            carry.open.append(f"algorithm.kl.kind: {kind} = {name!r} has no counterpart; choose k1, k2, k3 or abs")
    if in_loss and in_reward:
        for key in reward[:3]:
            carry.lose(key, "the divergence is taken once: in the loss")
    if carry.get("algorithm.kl_ctrl.type", "fixed") != "fixed" and in_reward:
        for name in ("type", "horizon", "target_kl"):
            carry.lose(f"algorithm.kl_ctrl.{name}", "the coefficient is fixed")


def carry_correction(carry: Carry) -> None:
    """verl computes the old log-probabilities again, unless it bypasses that."""
    at = "algorithm.rollout_correction"
    bypass = bool(carry.get(f"{at}.bypass_mode", False))
    reads_old = carry.values.get("algorithm.loss") in ("ppo_clip", "gspo", "cispo")
    level = carry.get(f"{at}.rollout_is")
    if reads_old or (level and not bypass):
        carry.put(f"{at}.bypass_mode", "algorithm.proximal", "sampler" if bypass else "recompute")
        if f"{at}.bypass_mode" not in carry.given:
            carry.values["algorithm.proximal"] = "recompute"
    if level in ("token", "sequence") and not bypass:
        carry.put(f"{at}.rollout_is", "algorithm.correction.level", level)
        carry.values["algorithm.correction.name"] = "tis"
        high = carry.get(f"{at}.rollout_is_threshold", 2.0)
        if isinstance(high, int | float):
            carry.put(f"{at}.rollout_is_threshold", "algorithm.correction.high", float(high))
        else:
            carry.lose(f"{at}.rollout_is_threshold", "tis has an upper bound only; see algorithm.correction")
    elif level:
        carry.lose(f"{at}.rollout_is", "without the learner's own log-probabilities nothing is corrected")
    else:
        carry.idle(f"{at}.rollout_is_threshold", "no correction")
        carry.idle(f"{at}.loss_type", "no correction")
