"""Ray, which runs parts on several machines; and what `headrace launch` asks a scheduler for."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator

import headrace.config.conditions.cluster as when
from headrace.config.base import LONGEST_S, Section
from headrace.config.effect import always, declare

Resources = dict[str, Annotated[float, Field(ge=0, le=1e12)]]
_NAME = re.compile(r"(?=.{1,253}$)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_LABEL = r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)"
_LABEL_KEY = re.compile(rf"({_NAME.pattern}/)?{_LABEL}")
"""What Kubernetes takes as names, and as labels."""


class ClusterSection(Section):
    """The Ray cluster that parts of the run are placed on."""

    address: str = ""
    """Empty: no Ray, all on this machine. "local" starts Ray on this machine for this run. "auto" joins the cluster
    that this machine belongs to. Or the address of one: "HOST:6379", "ray://HOST:10001"."""
    strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    """How bundles are placed: on few nodes or on many, if possible; STRICT: on one node, or each on a node of its own,
    or not at all."""
    learner: Resources = {"CPU": 1.0}
    """What each rank of the learner takes, such as { CPU = 4, GPU = 1 }. A colocated engine shares it."""
    engine: Resources = {}
    """What each engine replica takes, such as { CPU = 4, GPU = 1 }. Empty: engines run on the trainer's machine. A
    colocated engine has no bundle of its own."""
    judger: Resources = {"CPU": 1.0}
    """What each judger actor takes."""
    labels: dict[str, str] = {}
    """Use only nodes with these labels, such as { "ray.io/accelerator-type" = "H100" }; a value may be "in(A,B)" or
    "!in(A,B)". `ray start --labels` gives them."""
    runtime_env: dict[str, Any] = {}
    """Ray's runtime environment for all actors: env_vars, working_dir, py_modules, pip, container ..."""
    patience_s: float = Field(default=300.0, gt=0, le=LONGEST_S)
    """How long to wait for nodes that can hold the placement, at the start and after a node was lost."""

    effects: ClassVar = declare(
        when.PLACES("address"),
        when.ON_RAY("strategy", "learner", "engine", "judger", "labels", "runtime_env", "patience_s"),
        when.RAY_LEARNERS("learner"),
        when.RAY_ENGINES("engine"),
        when.RAY_JUDGERS("judger"),
    )

    @field_validator("learner", "engine", "judger")
    @classmethod
    def _takes_something(cls, resources: dict[str, float], info: ValidationInfo) -> dict[str, float]:
        if not any(resources.values()) and (resources or info.field_name != "engine"):
            raise ValueError(f"must take something, got {resources}; such as {{ CPU = 1 }}")
        return resources

    @field_validator("address")
    @classmethod
    def _is_an_address(cls, address: str) -> str:
        if address in ("", "auto", "local") or re.fullmatch(r"(ray://)?[^\s:/]+:\d+", address):
            return address
        raise ValueError(f'must be "", "local", "auto", "HOST:PORT" or "ray://HOST:PORT", got {address!r}')


class SlurmSection(Section):
    """The batch script of `headrace launch --on slurm`."""

    partition: str | None = None
    """Partition that the job is queued in; empty for the site's default."""
    account: str | None = None
    """Account that is charged; empty for your default."""
    qos: str | None = None
    """Quality of service; empty for the default."""
    constraint: str | None = None
    """Features that nodes must have."""
    options: tuple[str, ...] = ()
    """Further options of sbatch, a line each, such as "--exclusive"."""
    setup: tuple[str, ...] = ()
    """Shell commands before the run starts, such as "module load cuda" and "source env/bin/activate"."""
    requeue: bool = True
    """Queue the job again when it is preempted or its time is over; it then resumes the run."""

    effects: ClassVar = always("partition", "account", "qos", "constraint", "options", "setup", "requeue")

    @field_validator("partition", "account", "qos", "constraint", "options", "setup")
    @classmethod
    def _is_one_line(cls, value: Any) -> Any:
        lines = value if isinstance(value, tuple) else (value or "",)
        if bad := [line for line in lines if "\n" in line or "\r" in line]:
            raise ValueError(f"must be one line each, got {bad[0]!r}")
        return value

    @field_validator("options")
    @classmethod
    def _are_options(cls, options: tuple[str, ...]) -> tuple[str, ...]:
        if bad := [option for option in options if not option.startswith("-")]:
            raise ValueError(f'must be options of sbatch, such as "--exclusive", got {bad[0]!r}')
        return options


class K8sSection(Section):
    """The RayJob of `headrace launch --on k8s` (KubeRay)."""

    image: str = ""
    """Container image with Headrace and Ray in it; the Dockerfile makes one."""
    ray_version: str = "2.60.0"
    """Version of Ray in the image."""
    namespace: str = "default"
    """Namespace of the job."""
    volume_claim: str = ""
    """Persistent volume claim that holds runs. It must outlive the job, or a run could not be resumed."""
    mount: str = "/runs"
    """Where the volume is mounted; run.dir is set to it."""
    service_account: str | None = None
    """Service account of the pods; empty for the namespace's default."""
    node_selector: dict[str, str] = {}
    """Labels that nodes must have."""
    retries: int = Field(default=3, ge=0, le=1000)
    """How often the job is started again after it failed or was preempted; it then resumes the run."""

    effects: ClassVar = always(
        "image", "ray_version", "namespace", "volume_claim", "mount", "service_account", "node_selector", "retries"
    )

    @field_validator("image")
    @classmethod
    def _is_an_image(cls, image: str) -> str:
        if re.search(r"\s", image):
            raise ValueError(f"must be the name of an image, without spaces, got {image!r}")
        return image

    @field_validator("namespace", "volume_claim", "service_account")
    @classmethod
    def _is_a_name(cls, name: str | None, info: ValidationInfo) -> str | None:
        if name and not _NAME.fullmatch(name):
            raise ValueError(f"must be a name of lower-case letters, digits and dashes, got {name!r}")
        if name and info.field_name == "namespace" and ("." in name or len(name) > 63):
            raise ValueError(f"must have no dots and at most 63 characters, got {name!r}")
        return name

    @field_validator("node_selector")
    @classmethod
    def _are_labels(cls, labels: dict[str, str]) -> dict[str, str]:
        for key, value in labels.items():
            if not (_LABEL_KEY.fullmatch(key) and re.fullmatch(f"{_LABEL}?", value)):
                raise ValueError(
                    f"must be labels of letters, digits, dashes, dots and underscores, at most 63 each, got "
                    f"{key!r} = {value!r}"
                )
        return labels

    @field_validator("mount")
    @classmethod
    def _is_absolute(cls, mount: str) -> str:
        if not PurePosixPath(mount).is_absolute() or mount == "/" or ":" in mount:
            raise ValueError(f'must be an absolute path below "/", without colons, got {mount!r}')
        return mount


class RayJobsSection(Section):
    """The job of `headrace launch --on ray`."""

    address: str = "http://127.0.0.1:8265"
    """Address of the cluster's dashboard, which takes jobs."""
    working_dir: str = "."
    """Folder that is copied to the cluster; it holds the run files and your own code."""

    effects: ClassVar = always("address", "working_dir")

    @field_validator("address")
    @classmethod
    def _is_http(cls, address: str) -> str:
        if not address.startswith(("http://", "https://")):
            raise ValueError(f"must begin with http:// or https://, got {address!r}")
        return address


class LaunchSection(Section):
    """What `headrace launch` asks a scheduler for."""

    nodes: int = Field(default=1, ge=1, le=100_000)
    """Machines. More than one need Ray ([cluster])."""
    cpus: int = Field(default=4, ge=1, le=4096)
    """CPU cores of each node."""
    gpus: int = Field(default=0, ge=0, le=64)
    """GPUs of each node."""
    memory_gb: float = Field(default=16.0, gt=0, le=100_000)
    """Memory of each node, in GB."""
    hours: float | None = Field(default=None, gt=0, le=100_000)
    """Time limit of the job; empty for the scheduler's own."""
    grace_s: float = Field(default=120.0, ge=2, le=86_400)
    """Seconds between the signal that stops the job and its end. Half of them are for the current step
    (run.grace_s), the others for saving."""
    slurm: SlurmSection = SlurmSection()
    """For --on slurm."""
    k8s: K8sSection = K8sSection()
    """For --on k8s."""
    ray: RayJobsSection = RayJobsSection()
    """For --on ray."""

    effects: ClassVar = always("nodes", "cpus", "gpus", "memory_gb", "hours", "grace_s")
