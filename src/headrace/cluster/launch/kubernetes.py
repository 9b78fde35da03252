"""A run as a RayJob of KubeRay (ray.io/v1): a Ray cluster for one job, which is deleted after it."""

from __future__ import annotations

import math
import re
import shlex
from pathlib import PurePosixPath
from typing import Any

from headrace.cluster.launch.job import Job, check_job, submit
from headrace.cluster.launch.yaml import to_yaml
from headrace.errors import ConfigError

_LONGEST_NAME = 30  # KubeRay appends to it, and what comes out may have 63 characters
_CONFIG = PurePosixPath("/etc/headrace/run.toml")


def render_k8s(job: Job, settings: str, stamp: str) -> str:
    """A ConfigMap with all settings of the run (TOML), and the RayJob that reads it. `stamp` makes the names unique."""
    _check(job)
    name = f"{_dns_name(job.name)}-{stamp}"
    return "---\n".join(to_yaml(one) for one in (_config_map(job, name, settings), _ray_job(job, name)))


def submit_k8s(job: Job, settings: str, stamp: str) -> str:
    """Create both; what kubectl said."""
    return submit(["kubectl", "create", "-f", "-"], render_k8s(job, settings, stamp), "install kubectl")


def _check(job: Job) -> None:
    check_job(job.config)
    k8s = job.config.launch.k8s
    for setting, what in (
        ("image", 'such as "registry/headrace:cuda", made with the Dockerfile'),
        ("volume_claim", "the name of a persistent volume claim: a run in a pod's own files is lost with the pod"),
    ):
        if not getattr(k8s, setting):
            raise ConfigError(f"launch.k8s.{setting} is empty; set it: {what}")


def _metadata(job: Job, name: str) -> dict[str, Any]:
    labels = {"app.kubernetes.io/name": "headrace", "app.kubernetes.io/instance": name}
    return {"name": name, "namespace": job.config.launch.k8s.namespace, "labels": labels}


def _config_map(job: Job, name: str, settings: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1", "kind": "ConfigMap", "metadata": _metadata(job, name),
        "data": {_CONFIG.name: f"{settings.rstrip()}\n"},
    }  # fmt: skip


def _ray_job(job: Job, name: str) -> dict[str, Any]:
    launch, k8s = job.config.launch, job.config.launch.k8s
    command = Job(job.config, job.files).command([_CONFIG], f"--run.dir={k8s.mount}")
    spec: dict[str, Any] = {
        "entrypoint": shlex.join(command),
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": 60,
        "backoffLimit": k8s.retries,
        "rayClusterSpec": {
            "rayVersion": k8s.ray_version,
            "headGroupSpec": {"rayStartParams": {}, "template": _pod(job, name, "ray-head")},
        },
    }
    if launch.hours is not None:
        spec["activeDeadlineSeconds"] = math.ceil(launch.hours * 3600)
    if job.config.cluster.runtime_env:
        spec["runtimeEnvYAML"] = to_yaml(job.config.cluster.runtime_env)
    others = launch.nodes - 1
    if others:
        spec["rayClusterSpec"]["workerGroupSpecs"] = [
            {
                "groupName": "workers", "replicas": others, "minReplicas": others, "maxReplicas": others,
                "rayStartParams": {}, "template": _pod(job, name, "ray-worker"),
            }
        ]  # fmt: skip
    return {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": _metadata(job, name), "spec": spec}


def _pod(job: Job, name: str, role: str) -> dict[str, Any]:
    launch, k8s = job.config.launch, job.config.launch.k8s
    amounts: dict[str, Any] = {"cpu": str(launch.cpus), "memory": f"{math.ceil(launch.memory_gb * 1024)}Mi"}
    amounts |= {"nvidia.com/gpu": str(launch.gpus)} if launch.gpus else {}
    container: dict[str, Any] = {
        "name": role,
        "image": k8s.image,
        "resources": {"requests": amounts, "limits": dict(amounts)},
        "volumeMounts": [
            {"name": "runs", "mountPath": k8s.mount},
            {"name": "config", "mountPath": str(_CONFIG.parent), "readOnly": True},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }
    if role == "ray-head":  # the run is no child of the container's first process, so nobody else would signal it
        container["lifecycle"] = {"preStop": {"exec": {"command": ["/bin/sh", "-c", _STOP]}}}
    spec: dict[str, Any] = {
        "terminationGracePeriodSeconds": math.ceil(launch.grace_s),
        "containers": [container],
        "volumes": [
            {"name": "runs", "persistentVolumeClaim": {"claimName": k8s.volume_claim}},
            {"name": "config", "configMap": {"name": name}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
        ],
    }
    if k8s.service_account:
        spec["serviceAccountName"] = k8s.service_account
    if k8s.node_selector:
        spec["nodeSelector"] = dict(k8s.node_selector)
    return {"spec": spec}


# [h] keeps the shell that runs this from finding itself
_STOP = 'pkill -TERM -f "[h]eadrace train" && while pgrep -f "[h]eadrace train" > /dev/null; do sleep 1; done; true'


def _dns_name(name: str) -> str:
    found = re.sub(r"[^a-z0-9-]+", "-", name.lower()).strip("-")[:_LONGEST_NAME].strip("-")
    return found if found and found[0].isalpha() else f"run-{found}".rstrip("-")
