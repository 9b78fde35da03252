"""A resolved configuration of verl's PPO trainer as a run file."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

from headrace.errors import ConfigError
from headrace.migration.carry import Carry, Imported, finished, fits
from headrace.migration.verl_algorithm import carry_correction, carry_divergence, carry_estimator, carry_loss
from headrace.migration.verl_rest import DECISIVE, REST, WITHOUT_COUNTERPART
from headrace.migration.verl_rollout import carry_backend, carry_engine, carry_rollout

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"
_MODEL = "actor_rollout_ref.model"
_FSDP = f"{_ACTOR}.fsdp_config"
_OPTIM = f"{_ACTOR}.optim"

_DTYPES = {"fp32": "float32", "float32": "float32", "bf16": "bfloat16", "bfloat16": "bfloat16"}
_TRACKERS = {name: name for name in ("console", "wandb", "mlflow", "tensorboard", "trackio")} | {"file": "jsonl"}


def import_verl(given: dict[str, Any], tasks: int | None = None) -> Imported:
    """Our settings; `tasks` is the number of training tasks, by which epochs become steps."""
    check_is_verl(given)
    carry = Carry(given)
    carry_verl(carry, tasks)
    carry.finish(REST, DECISIVE)
    return finished(carry)


def check_is_verl(given: dict[str, Any]) -> None:
    """Refuse what is no configuration of verl's PPO trainer."""
    needed = (f"{_MODEL}.path", f"{_ROLLOUT}.n", "data.train_files", "algorithm.adv_estimator")
    missing = [key for key in needed if key not in given]
    if missing:
        raise ConfigError(
            f"this is no resolved configuration of verl's PPO trainer: it has no {', '.join(missing)}; add "
            f"`--cfg job --resolve` to the command of verl.trainer.main_ppo, and give what it prints"
        )


def carry_verl(carry: Carry, tasks: int | None) -> None:
    """Everything that has a counterpart."""
    _model(carry)
    _optimizer(carry)
    _data(carry)
    updates = _batches(carry)
    _steps(carry, updates, tasks)
    carry_rollout(carry)
    carry_engine(carry)
    carry_estimator(carry)
    carry_loss(carry)
    carry_divergence(carry)
    carry_correction(carry)
    carry_backend(carry)
    _reward(carry)
    _run(carry)
    _switched_on(carry)


def _switched_on(carry: Carry) -> None:
    """Parts that are off by default and that Headrace does not have: if they are on, the user must know."""
    for key in list(carry.given):
        section, _, switch = key.rpartition(".")
        if not (switch in ("enable", "enabled") and carry.given[key] is True) or not fits(section, WITHOUT_COUNTERPART):
            continue
        carry.open.append(f"{key} = true: Headrace has no such part; check that the run makes sense without it")
        for inner in carry.given:
            if inner.startswith(f"{section}.") and not inner.endswith("_target_"):
                carry.lose(inner, "there is no such part")


def _model(carry: Carry) -> None:
    carry.put(f"{_MODEL}.path", "model.name", carry.get(f"{_MODEL}.path"))
    gradient_checkpointing = carry.get(f"{_MODEL}.enable_gradient_checkpointing", False)
    carry.put(f"{_MODEL}.enable_gradient_checkpointing", "backend.gradient_checkpointing", gradient_checkpointing)
    for key, ours, note in (
        (f"{_FSDP}.dtype", "model.dtype", "computing"),
        (f"{_FSDP}.model_dtype", "optimizer.master_dtype", "what the optimizer updates"),
    ):
        if (dtype := carry.get(key)) in _DTYPES:
            carry.put(key, ours, _DTYPES[dtype], note)
    if carry.get(f"{_ROLLOUT}.dtype") in _DTYPES:
        same = carry.values.get("model.dtype") == _DTYPES[carry.get(f"{_ROLLOUT}.dtype")]
        if same:
            carry.as_here(f"{_ROLLOUT}.dtype", "engines sample in model.dtype")
        else:
            carry.lose(f"{_ROLLOUT}.dtype", "engines sample in model.dtype; `--dtype` in engine.server_args differs")
    _lora(carry)


def _lora(carry: Carry) -> None:
    rank = carry.get(f"{_MODEL}.lora_rank", 0)
    carry.put(f"{_MODEL}.lora_rank", "model.lora.rank", rank)
    if not rank:
        for name in ("lora_alpha", "target_modules", "exclude_modules", "lora_adapter_path"):
            carry.idle(f"{_MODEL}.{name}", "no adapters: lora_rank is 0")
        return
    carry.put(f"{_MODEL}.lora_alpha", "model.lora.alpha", float(carry.get(f"{_MODEL}.lora_alpha", 16)))
    targets = carry.get(f"{_MODEL}.target_modules")
    if targets == "all-linear":
        carry.as_here(f"{_MODEL}.target_modules", "model.lora.targets are all linear layers of the usual names")
    elif isinstance(targets, list):
        carry.put(f"{_MODEL}.target_modules", "model.lora.targets", targets)
    else:
        carry.lose(f"{_MODEL}.target_modules", "name the layers in model.lora.targets")


def _optimizer(carry: Carry) -> None:
    carry.put(f"{_OPTIM}.lr", "optimizer.lr", carry.get(f"{_OPTIM}.lr"))
    for name in ("betas", "weight_decay"):
        if (value := carry.get(f"{_OPTIM}.{name}")) is not None:
            note = "on matrices only" if name == "weight_decay" else ""
            carry.put(f"{_OPTIM}.{name}", f"optimizer.{name}", value, note)
    clip = carry.get(f"{_ACTOR}.grad_clip", carry.get(f"{_OPTIM}.clip_grad", 1.0))
    carry.put(f"{_OPTIM}.clip_grad", "optimizer.grad_clip", clip)
    carry.put(f"{_ACTOR}.grad_clip", "optimizer.grad_clip", clip)
    name = carry.get(f"{_OPTIM}.optimizer", "AdamW")
    if name == "AdamW":
        carry.as_here(f"{_OPTIM}.optimizer", "AdamW")
    else:
        carry.lose(f"{_OPTIM}.optimizer", "the optimizer is AdamW")
        carry.open.append(f"{_OPTIM}.optimizer = {name!r}: Headrace has AdamW only")
    falls = carry.get(f"{_OPTIM}.lr_scheduler_type", "constant") == "cosine"
    carry.put(f"{_OPTIM}.lr_scheduler_type", "optimizer.schedule", "cosine" if falls else "constant")
    if falls:
        carry.put(f"{_OPTIM}.min_lr_ratio", "optimizer.min_lr_ratio", carry.get(f"{_OPTIM}.min_lr_ratio", 0.0))
    else:
        carry.idle(f"{_OPTIM}.min_lr_ratio", "the learning rate is constant")
        carry.idle(f"{_OPTIM}.num_cycles", "the learning rate is constant")


def _data(carry: Carry) -> None:
    columns = {
        "messages": carry.get("data.prompt_key", "prompt"),
        "answer": "reward_model.ground_truth",
        "source": carry.get("data.reward_fn_key", "data_source"),
    }
    source = {"columns": columns, "keep_columns": True}
    files = _files(carry.get("data.train_files"))
    if len(files) == 1:
        carry.put("data.train_files", "data.tasks", files[0])
        carry.values |= {"data.columns": columns, "data.keep_columns": True}
    else:
        carry.put(
            "data.train_files",
            "data.mixture",
            {_set_name(file): {"tasks": file, "weight": 1.0, **source} for file in files},
            "drawn by weight; verl draws each file by its rows: set the weights to these numbers",
        )
        carry.open.append(
            "data.mixture: the sources are drawn equally often; set their weights to their numbers of rows"
        )
    for key, name in (("data.prompt_key", "messages"), ("data.reward_fn_key", "source")):
        carry.part_of(key, f"data.columns.{name}")
    carry.put("data.shuffle", "data.shuffle", bool(carry.get("data.shuffle", True)))
    if carry.get("data.seed") is not None:
        carry.put("data.seed", "run.seed", carry.get("data.seed"))
    _validation(carry, source)


def _validation(carry: Carry, source: dict[str, Any]) -> None:
    kwargs = f"{_ROLLOUT}.val_kwargs"
    warm = bool(carry.get(f"{kwargs}.do_sample", False))
    made: dict[str, Any] = {"temperature": float(carry.get(f"{kwargs}.temperature", 0)) if warm else 0.0}
    if warm and made["temperature"] > 0:
        made |= {"attempts": carry.get(f"{kwargs}.n", 1), "top_p": float(carry.get(f"{kwargs}.top_p", 1.0))}
    if (most := carry.get("data.val_max_samples", -1)) > 0:
        made["limit"] = most
    sets = {_set_name(file): {"tasks": file, **source, **made} for file in _files(carry.get("data.val_files", []))}
    if sets:
        carry.put("data.val_files", "eval.sets", sets)
        if warm and carry.get(f"{kwargs}.top_k", -1) > 0:
            carry.lose(f"{kwargs}.top_k", "evaluation has no top_k")
        for name, ours in (("temperature", "temperature"), ("n", "attempts"), ("top_p", "top_p")):
            carry.part_of(f"{kwargs}.{name}", f"eval.sets.*.{ours}")
        carry.part_of(f"{kwargs}.do_sample", "eval.sets.*.temperature")
        carry.put("trainer.val_before_train", "eval.before", bool(carry.get("trainer.val_before_train", True)))


def _files(given: Any) -> list[str]:
    return [given] if isinstance(given, str) else [str(file) for file in given or ()]


def _set_name(file: str) -> str:
    path = PurePath(file)
    return f"{path.parent.name}_{path.stem}" if path.parent.name else path.stem


def _batches(carry: Carry) -> int:
    """Tasks per batch, and optimizer steps per batch, which are returned."""
    batch = carry.get("data.train_batch_size", 1024)
    mini = carry.get(f"{_ACTOR}.ppo_mini_batch_size", batch)
    carry.put("data.train_batch_size", "trainer.batch_size", batch)
    updates = max(1, batch // mini)
    note = "" if batch % mini == 0 else f"{batch} tasks in equal shares: {batch / updates:g} instead of {mini}"
    carry.put(f"{_ACTOR}.ppo_mini_batch_size", "trainer.updates_per_batch", updates, note)
    if carry.get(f"{_ACTOR}.ppo_epochs", 1) > 1:
        carry.lose(f"{_ACTOR}.ppo_epochs", "a batch is trained once; produce.reuse trains groups again, in later steps")
    else:
        carry.as_here(f"{_ACTOR}.ppo_epochs", "each batch is trained once")
    return updates


def _steps(carry: Carry, updates: int, tasks: int | None) -> None:
    """verl counts batches, Headrace optimizer steps."""
    batch = carry.values["trainer.batch_size"]
    counted = f"optimizer steps: {updates} per batch" if updates > 1 else ""
    if (steps := carry.get("trainer.total_training_steps")) is not None:
        carry.put("trainer.total_training_steps", "trainer.steps", steps * updates, counted)
        carry.idle("trainer.total_epochs", "total_training_steps decides")
    elif tasks is not None:
        steps = carry.get("trainer.total_epochs", 1) * max(1, tasks // batch)
        carry.put("trainer.total_epochs", "trainer.steps", steps * updates, f"of {tasks} tasks; {counted}".rstrip("; "))
    else:
        epochs = carry.get("trainer.total_epochs", 1)
        carry.lose("trainer.total_epochs", "runs are counted in steps; give --tasks N, the number of training tasks")
        carry.open.append(
            f"trainer.steps: {epochs} epochs need the number of training tasks; import again with --tasks N"
        )
    warmup = carry.get(f"{_OPTIM}.lr_warmup_steps", -1)
    if warmup > 0:
        carry.put(f"{_OPTIM}.lr_warmup_steps", "optimizer.warmup_steps", warmup * updates, counted)
        carry.idle(f"{_OPTIM}.lr_warmup_steps_ratio", "lr_warmup_steps decides")
    else:
        ratio = carry.get(f"{_OPTIM}.lr_warmup_steps_ratio", 0.0)
        carry.put(f"{_OPTIM}.lr_warmup_steps_ratio", "optimizer.warmup_ratio", ratio)
        carry.idle(f"{_OPTIM}.lr_warmup_steps", "lr_warmup_steps_ratio decides")
    carry.put("trainer.save_freq", "trainer.save_every", max(0, carry.get("trainer.save_freq", -1)) * updates, counted)
    if "eval.sets" in carry.values:
        every = max(0, carry.get("trainer.test_freq", -1)) * updates
        carry.put("trainer.test_freq", "eval.every", every, counted)


def _reward(carry: Carry) -> None:
    """verl's reward functions judge here unchanged."""
    for at in ("reward.custom_reward_function", "custom_reward_function"):
        if path := carry.get(f"{at}.path"):
            function = f"{path}:{carry.get(f'{at}.name', 'compute_score')}"
            carry.values["workflow.judger_args"] = {"function": function}
            carry.part_of(f"{at}.path", "workflow.judger_args.function")
            carry.part_of(f"{at}.name", "workflow.judger_args.function")
        else:
            carry.idle(f"{at}.name", "no function of its own")
    carry.values["workflow.judger"] = "verl_reward"
    carry.part_of("reward.reward_manager.name", "workflow.judger", "needs the package verl for verl's own functions")
    if carry.get("reward.reward_manager.name", "naive") != "naive":
        carry.lose("reward.reward_manager.name", "judger verl_reward calls the function as the manager naive does")
        carry.open.append("workflow.judger: your reward manager has no counterpart; check what its rewards should be")


def _run(carry: Carry) -> None:
    name = carry.get("trainer.experiment_name", "verl")
    carry.put("trainer.experiment_name", "run.name", str(name).replace("/", "-"))
    folder = PurePath(carry.get("trainer.default_local_dir", "runs"))
    if folder.name == name:
        carry.put("trainer.default_local_dir", "run.dir", str(folder.parent))
    else:
        carry.put("trainer.default_local_dir", "run.dir", str(folder))
    found = _files(carry.get("trainer.logger", ["console"]))
    known = [_TRACKERS[one] for one in found if one in _TRACKERS]
    unknown = [one for one in found if one not in _TRACKERS]
    note = f"no tracker {', '.join(unknown)}" if unknown else ""
    carry.put("trainer.logger", "track.trackers", list(dict.fromkeys([*known, "jsonl"])), note)
    if {"wandb", "mlflow", "trackio"} & {*known}:
        carry.put("trainer.project_name", "track.project", carry.get("trainer.project_name", "verl"))
    resume = carry.get("trainer.resume_mode", "auto")
    if resume == "auto":
        carry.put("trainer.resume_mode", "run.resume", "auto")
    elif resume == "disable":
        carry.put("trainer.resume_mode", "run.resume", "never")
    else:
        carry.lose(
            "trainer.resume_mode", "checkpoints of verl cannot be resumed here; export them, and name the folder"
        )
    if (keep := carry.get("trainer.max_actor_ckpt_to_keep")) is not None:
        carry.put("trainer.max_actor_ckpt_to_keep", "trainer.keep_last", keep)
    mode = carry.get("trainer.v1.trainer_mode", "sync")
    if mode == "sync":
        carry.as_here("trainer.v1.trainer_mode", "trainer.max_staleness = 0")
    else:
        for key in (key for key in carry.given if key.startswith(("trainer.v1.trainer_mode", f"trainer.v1.{mode}."))):
            carry.lose(key, "set trainer.max_staleness and trainer.placement")
        carry.open.append(
            f"trainer.max_staleness: {mode} generates ahead of training; say how far, and trainer.placement"
        )
