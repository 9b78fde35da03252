"""Run files as jobs of schedulers: valid scripts and manifests, and refusals of what would make no sense."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from headrace.cli.main import run
from headrace.cluster.launch.job import Job
from headrace.cluster.launch.kubernetes import render_k8s
from headrace.cluster.launch.ray_job import render_ray
from headrace.cluster.launch.slurm import render_slurm
from headrace.cluster.launch.yaml import to_yaml
from headrace.config import ClusterSection
from headrace.config.loading import build_config, load_config
from headrace.errors import ConfigError

BASE = """
[run]
name = "My run_1"
dir = "/shared/runs"
[workflow]
judger = "countdown"
[data]
tasks = "countdown"
"""
CLUSTER = """
[judge]
placement = "ray"
[cluster]
address = "auto"
runtime_env = { env_vars = { TOKEN = "a b" } }
[launch]
nodes = 3
gpus = 2
hours = 1.5
[launch.slurm]
partition = "gpu"
setup = ["source env/bin/activate"]
[launch.k8s]
image = "registry/headrace:cuda"
volume_claim = "runs"
node_selector = { pool = "a" }
service_account = "trainer"
"""
Caught = pytest.CaptureFixture[str]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.toml").write_text(BASE)
    (tmp_path / "it's cluster.toml").write_text(CLUSTER)
    return Path("base.toml"), Path("it's cluster.toml")


def job(files: tuple[Path, ...], *overrides: str) -> Job:
    return Job(load_config(list(files), overrides), files, overrides)


# ---- Slurm -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alone", [True, False])
def test_a_batch_script_is_valid_bash_and_shellcheck_finds_nothing(files: tuple[Path, Path], alone: bool) -> None:
    script = render_slurm(job(files[:1] if alone else files, "--run.seed", "7"))
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", "--exclude=SC1091", "-"], input=script, text=True, check=True)
    assert ("ray start" in script) is not alone
    assert "--run.seed 7" in script and "--run.grace_s=60" in script


def test_a_batch_script_asks_for_what_launch_says(files: tuple[Path, Path]) -> None:
    script = render_slurm(job(files))
    options = {line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH")}
    assert options >= {
        "--job-name=My-run_1", "--nodes=3", "--gpus-per-node=2", "--cpus-per-task=4", "--mem=16384M",
        "--time=1:30:00", "--partition=gpu", "--signal=B:TERM@120", "--requeue",
    }  # fmt: skip
    assert "--nodes=2 --ntasks=2" in script  # the head's node is the script's own
    assert "source env/bin/activate" in script


def test_a_batch_script_passes_a_signal_on_waits_for_the_run_and_queues_it_again(
    files: tuple[Path, Path], tmp_path: Path
) -> None:
    """The script itself, with programs of our own in place of headrace and scontrol."""
    programs = tmp_path / "bin"
    programs.mkdir()
    _program(programs / "scontrol", 'echo "$@" >> scontrol.log')
    _program(programs / "headrace", "trap 'sleep 0.5; echo saved > saved; exit 130' TERM; touch began; sleep 20 & wait")
    environment = {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "SLURM_JOB_ID": "42"}
    process = subprocess.Popen(["bash"], stdin=subprocess.PIPE, text=True, env=environment, cwd=tmp_path)
    assert process.stdin is not None
    process.stdin.write(render_slurm(job(files[:1])))
    process.stdin.close()
    until = time.monotonic() + 20
    while not (tmp_path / "began").exists():
        assert time.monotonic() < until and process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 130
    assert (tmp_path / "saved").exists() and (tmp_path / "scontrol.log").read_text() == "requeue 42\n"


def _program(path: Path, script: str) -> None:
    path.write_text(f"#!/usr/bin/env bash\n{script}\n")
    path.chmod(0o755)


# ---- KubeRay ---------------------------------------------------------------------------------------------------------

STRING, INTEGER, FLAG = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}
TEXTS = {"type": "object", "additionalProperties": STRING}


def closed(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


def array(of: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": of}


CONTAINER = closed(
    ("name",), name=STRING, image=STRING, resources=closed(requests=TEXTS, limits=TEXTS),
    volumeMounts=array(closed(("name", "mountPath"), name=STRING, mountPath=STRING, readOnly=FLAG)),
    lifecycle=closed(preStop=closed(exec=closed(command=array(STRING)))),
)  # fmt: skip
POD = closed(
    spec=closed(
        ("containers",), containers=array(CONTAINER), terminationGracePeriodSeconds=INTEGER, serviceAccountName=STRING,
        nodeSelector=TEXTS,
        volumes=array(closed(
            ("name",), name=STRING, persistentVolumeClaim=closed(("claimName",), claimName=STRING),
            configMap=closed(name=STRING), emptyDir=closed(medium=STRING),
        )),
    )
)  # fmt: skip
HEAD = closed(("template",), rayStartParams=TEXTS, template=POD)
WORKERS = closed(
    ("groupName", "maxReplicas", "minReplicas", "template"), groupName=STRING, replicas=INTEGER, minReplicas=INTEGER,
    maxReplicas=INTEGER, rayStartParams=TEXTS, template=POD,
)  # fmt: skip
RAY_JOB = closed(
    ("apiVersion", "kind", "metadata", "spec"), apiVersion=STRING, kind=STRING,
    metadata=closed(name=STRING, namespace=STRING, labels=TEXTS),
    spec=closed(
        entrypoint=STRING, runtimeEnvYAML=STRING, shutdownAfterJobFinishes=FLAG, ttlSecondsAfterFinished=INTEGER,
        backoffLimit=INTEGER, activeDeadlineSeconds=INTEGER,
        rayClusterSpec=closed(
            ("headGroupSpec",), rayVersion=STRING, headGroupSpec=HEAD, workerGroupSpecs=array(WORKERS)
        ),
    ),
)  # fmt: skip
"""The fields that we use, with their types and which are required, as KubeRay's CRD of ray.io/v1 (1.7) has them.

A field that is not here has not been looked up. HEADRACE_RAYJOB_CRD=FILE.yaml checks against the complete CRD.
"""


def manifests(files: tuple[Path, ...], *overrides: str) -> tuple[dict[str, Any], dict[str, Any]]:
    first, second = yaml.safe_load_all(render_k8s(job(files, *overrides), 'a = 1\n\n[b]\nc = "x"', "0102-030405"))
    return first, second


@pytest.mark.parametrize("overrides", [(), ("--launch.nodes=1", "--launch.gpus=0")])
def test_a_ray_job_fits_the_schema(files: tuple[Path, Path], overrides: tuple[str, ...]) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    _, found = manifests(files, *overrides)
    jsonschema.validate(found, RAY_JOB)
    if crd := os.environ.get("HEADRACE_RAYJOB_CRD"):
        versions = yaml.safe_load(Path(crd).read_text())["spec"]["versions"]
        (schema,) = [one["schema"]["openAPIV3Schema"] for one in versions if one["name"] == "v1"]
        jsonschema.validate(found, _strict(schema))


def _strict(schema: Any) -> Any:
    """A server drops unknown fields; here they are mistakes."""
    if isinstance(schema, list):
        return [_strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: _strict(value) for key, value in schema.items()}
    is_open = schema.get("x-kubernetes-preserve-unknown-fields") or "metadata" in schema.get("properties", {})
    if "properties" in schema and schema.get("type") == "object" and not is_open:
        found["additionalProperties"] = False
    return found


def test_a_ray_job_runs_the_run_file_and_keeps_its_folder_on_the_volume(files: tuple[Path, Path]) -> None:
    settings, found = manifests(files)
    assert settings["data"] == {"run.toml": 'a = 1\n\n[b]\nc = "x"\n'}
    assert found["metadata"]["name"] == settings["metadata"]["name"] == "my-run-1-0102-030405"
    spec = found["spec"]
    assert spec["entrypoint"] == (
        "headrace train /etc/headrace/run.toml --cluster.address=auto --run.grace_s=60 --run.dir=/runs"
    )
    assert yaml.safe_load(spec["runtimeEnvYAML"]) == {"env_vars": {"TOKEN": "a b"}}
    workers = spec["rayClusterSpec"]["workerGroupSpecs"][0]
    assert workers["replicas"] == 2 and spec["activeDeadlineSeconds"] == 5400
    pod = workers["template"]["spec"]
    assert pod["containers"][0]["resources"]["limits"] == {"cpu": "4", "memory": "16384Mi", "nvidia.com/gpu": "2"}
    mounts = {one["name"]: one["mountPath"] for one in pod["containers"][0]["volumeMounts"]}
    volumes = {one["name"]: one for one in pod["volumes"]}
    assert mounts["runs"] == "/runs" and volumes["runs"]["persistentVolumeClaim"] == {"claimName": "runs"}
    assert mounts["config"] == "/etc/headrace" and volumes["config"]["configMap"]["name"] == found["metadata"]["name"]


def test_all_settings_come_through_the_manifest(files: tuple[Path, Path], capsys: Caught) -> None:
    words = ["launch", *map(str, files), "--on", "k8s", "--dry-run", "--optimizer.lr", "3e-4"]
    assert run(words) == 0
    settings, _ = yaml.safe_load_all(capsys.readouterr().out)
    Path("again.toml").write_text(settings["data"]["run.toml"])
    assert load_config("again.toml") == load_config(list(files), ["--optimizer.lr", "3e-4"])


def test_variables_in_any_script_come_through_the_manifest(files: tuple[Path, Path]) -> None:
    Path("more.toml").write_text("[cluster.runtime_env.env_vars]\nTOKEN = \"\U0001f600 'ü' $HOME: #\"\n")
    _, found = manifests((*files, Path("more.toml")))
    assert yaml.safe_load(found["spec"]["runtimeEnvYAML"]) == {"env_vars": {"TOKEN": "\U0001f600 'ü' $HOME: #"}}


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), PLAIN, min_size=1, max_size=3))
def test_any_plain_values_read_back_from_yaml(value: dict[str, Any]) -> None:
    assert yaml.safe_load(to_yaml(value)) == value


# ---- Ray -------------------------------------------------------------------------------------------------------------


def test_a_ray_job_line_has_paths_within_what_is_copied(files: tuple[Path, Path]) -> None:
    with pytest.warns(UserWarning, match=r"launch\.nodes, launch\.gpus, launch\.hours: the cluster has its own nodes"):
        line = render_ray(job(files), "0102-030405")
    assert line.startswith("ray job submit --address http://127.0.0.1:8265 --submission-id ")
    assert "-- headrace train base.toml" in line and "--working-dir ." in line
    subprocess.run(["bash", "-n"], input=line, text=True, check=True)


@pytest.mark.parametrize(
    "wanted", [{"env_vars": {"A": "1", "B": "2"}}, {"env_vars": {"A": "1"}, "working_dir": "."}, {}]
)
@pytest.mark.parametrize("of_job", [{"env_vars": {"A": "1"}, "working_dir": "gcs://of-the-job.zip"}, {}])
def test_a_job_of_ray_starts_though_it_has_the_runtime_environment_already(
    monkeypatch: pytest.MonkeyPatch, wanted: dict[str, Any], of_job: Any
) -> None:
    ray = pytest.importorskip("ray")
    from ray.runtime_env.runtime_env import _merge_runtime_env

    from headrace.cluster.connection import connect

    given: dict[str, Any] = {}
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **arguments: given.update(arguments))
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps({"runtime_env": of_job, "metadata": {}}))
    connect(ClusterSection(address="auto", runtime_env=wanted))
    merged: Any = _merge_runtime_env(of_job, given["runtime_env"])  # as ray.init does; None: it refuses the two
    variables = wanted.get("env_vars", {}) | of_job.get("env_vars", {})
    assert merged == wanted | of_job | ({"env_vars": variables} if variables else {})


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["base.toml", "--on", "slurm", "--launch.nodes", "2"], "all nodes but one would be idle"),
        (["base.toml", "--on", "slurm", "--run.resume", "never"], "starts a new run whenever the scheduler"),
        (["base.toml", "--on", "k8s"], "launch.k8s.image is empty"),
        (["base.toml", "--on", "k8s", "--launch.k8s.image=a"], "launch.k8s.volume_claim is empty"),
        (["base.toml", "--on", "ray", "--run.dir", "runs"], 'run.dir = "runs" is relative'),
        (["base.toml", "--on", "ray", "--launch.ray.working_dir", "/nowhere"], "is not in launch.ray.working_dir"),
        (["base.toml", "--on", "pbs"], "pbs"),
        (["base.toml", "--on", "slurm", "--launch.slurm.options", "exclusive"], "must be options of sbatch"),
        (
            ["base.toml", "--on", "slurm", "--launch.grace_s", "80000"],
            "launch.grace_s = 80000 is more than Slurm takes",
        ),
        (["base.toml", "--on", "k8s", "--launch.k8s.namespace", "team.a"], "must have no dots and at most 63"),
        (["base.toml", "--on", "k8s", "--launch.k8s.namespace", "a" * 64], "must have no dots and at most 63"),
        (["base.toml", "--on", "k8s", "--launch.k8s.volume_claim", "a..b"], "must be a name of lower-case letters"),
        (["base.toml", "--on", "k8s", "--launch.k8s.volume_claim", "a" * 254], "must be a name of lower-case"),
        (["base.toml", "--on", "k8s", "--launch.k8s.image", "a b"], "must be the name of an image, without spaces"),
        (["base.toml", "--on", "k8s", "--launch.k8s.mount", "/runs:ro"], 'below "/", without colons'),
        (["base.toml", "--on", "k8s", "--launch.k8s.node_selector", "{pool = 'a b'}"], "must be labels of letters"),
        (["base.toml", "--on", "slurm", "--workflow.judger", "countdwn"], 'did you mean "countdown"'),
    ],
)
def test_a_job_that_makes_no_sense_is_refused_in_one_line(
    files: tuple[Path, Path], capsys: Caught, words: list[str], says: str
) -> None:
    assert run(["launch", *words, "--dry-run"]) == 2
    out, err = capsys.readouterr()
    assert says in err and err.count("\n") == 1 and out == ""


def test_names_that_kubernetes_takes_are_taken() -> None:
    labels = {"example.com/pool": "", "a": "H_1"}
    given = {
        "namespace": "team-a", "volume_claim": "runs.v1", "service_account": "a" * 253, "mount": "/mnt/My runs",
        "image": "registry.example.com:5000/team/headrace@sha256:0f", "node_selector": labels,
    }  # fmt: skip
    assert build_config({"launch": {"k8s": given}}).launch.k8s.node_selector == labels


@pytest.mark.parametrize(("on", "program"), [("slurm", "sbatch"), ("k8s", "kubectl"), ("ray", "ray")])
def test_without_the_schedulers_program_the_error_says_so(
    files: tuple[Path, Path], capsys: Caught, monkeypatch: pytest.MonkeyPatch, on: str, program: str
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert run(["launch", *map(str, files), "--on", on]) == 2
    assert f"{program} is not on this machine's PATH" in capsys.readouterr().err


def test_what_a_scheduler_refuses_is_reported(
    files: tuple[Path, Path], capsys: Caught, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _program(tmp_path / "sbatch", "cat > got; echo 'invalid partition' >&2; exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert run(["launch", "base.toml", "--on", "slurm"]) == 2
    assert "failed with exit code 1: invalid partition" in capsys.readouterr().err
    assert (tmp_path / "got").read_text().startswith("#!/usr/bin/env bash\n#SBATCH")


def test_settings_of_a_cluster_need_a_cluster() -> None:
    with pytest.raises(ConfigError, match=r'judge\.placement = "ray" needs a cluster'):
        build_config({"judge": {"placement": "ray"}, "workflow": {"judger": "exact"}})
    with pytest.raises(ConfigError, match="no part of the run is placed on a cluster"):
        build_config({"cluster": {"address": "auto"}})
    with pytest.raises(ConfigError, match=r"cluster\.strategy = .* has no effect: cluster\.address is empty"):
        build_config({"cluster": {"strategy": "SPREAD"}})


def test_the_launcher_imports_no_ray() -> None:
    code = "import sys; import headrace.cluster.launch.slurm, headrace.cli.launch; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
