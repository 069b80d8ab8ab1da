"""The files of `docs/launch` do what clusters are told by them, as far as one machine can show it.

SLURM's script runs, with a stand-in for `srun` that starts processes with SLURM's variables. Of the
JobSet the objects are made that its controller would make, and JAX's own reader of a Kubernetes
cluster has to find coordinator, number of processes and ranks in them.
"""

import re
import sys
import types
from types import SimpleNamespace

import pytest
import yaml
from jax._src.clusters.k8s_cluster import K8sCluster
from processes import ROOT, reserved_port, run_shell

LAUNCH = ROOT / "docs/launch"

# Two tasks, one on each of two nodes that are this machine.
SRUN = """#!/bin/bash
[[ $1 == --kill-on-bad-exit=1 ]] || exit 2
shift
export SLURM_NTASKS=2 SLURM_STEP_NODELIST=127.0.0.1,127.0.0.2 SLURM_LOCALID=0
SLURM_PROCID=1 "$@" &
SLURM_PROCID=0 "$@"
wait
"""


def test_slurm_starts_one_process_for_each_gpu():
    script = (LAUNCH / "train.slurm").read_text()
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", script, re.MULTILINE))
    assert asked["ntasks-per-node"] == asked["gpus-per-node"]
    assert "#SBATCH --requeue" in script


@pytest.mark.whole
def test_slurms_script_trains(tmp_path):
    guide = (ROOT / "docs/guides/many_processes.md").read_text()
    train = re.search(r"^```python\n(.*?)^```", guide, re.DOTALL | re.MULTILINE)[1]
    (tmp_path / "train.py").write_text(train)
    (tmp_path / "srun").write_text(SRUN)
    (tmp_path / "srun").chmod(0o755)
    with reserved_port() as port:
        output, code = run_shell(
            ["bash", str(LAUNCH / "train.slurm")],
            tmp_path,
            JAX_NUM_CPU_DEVICES="1",
            JAX_COORDINATOR_PORT=str(port),
            SLURM_JOB_ID="1",
        )
    assert "2 processes, 2 devices, loss 0.0" in output and code == 0, output


def job_of(jobset, replicated):
    """The Job that JobSet's controller makes, with what JAX reads of it."""
    name = jobset["metadata"]["name"]
    return SimpleNamespace(
        metadata=SimpleNamespace(
            name=f"{name}-{replicated['name']}-0", labels={"jobset.sigs.k8s.io/jobset-name": name}
        ),
        spec=SimpleNamespace(**replicated["template"]["spec"]),
    )


def cluster_of(job, asked):
    """A stand-in for the client of Kubernetes, in which every pod is one of the job's."""
    pod = SimpleNamespace(
        metadata=SimpleNamespace(
            name="pod",
            labels={"job-name": job.metadata.name},
            owner_references=[SimpleNamespace(controller=True, kind="Job")],
        )
    )

    class Pods:
        def list_namespaced_pod(self, **_):
            asked.add(("", "pods", "list"))
            return SimpleNamespace(items=[pod])

    class Jobs:
        def read_namespaced_job(self, name, **_):
            asked.add(("batch", "jobs", "get"))
            assert name == job.metadata.name
            return job

    client = types.ModuleType("kubernetes")
    client.config = SimpleNamespace(load_incluster_config=lambda: None)
    errors = SimpleNamespace(ApiException=KeyError)
    client.client = SimpleNamespace(CoreV1Api=Pods, BatchV1Api=Jobs, exceptions=errors)
    return client


def test_jax_finds_its_processes_in_the_jobset(monkeypatch):
    text = (LAUNCH / "jobset.yaml").read_text()
    objects = {item["kind"]: item for item in yaml.safe_load_all(text)}
    (replicated,) = objects["JobSet"]["spec"]["replicatedJobs"]
    job, asked = job_of(objects["JobSet"], replicated), set()

    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("HOSTNAME", "localhost")
    monkeypatch.setitem(sys.modules, "kubernetes", cluster_of(job, asked))
    monkeypatch.setattr(K8sCluster, "_namespace", lambda: "default")
    assert K8sCluster.is_env_present()
    assert K8sCluster.get_coordinator_address(None, None) == "train-workers-0-0.train:55527"
    assert K8sCluster.get_process_count() == job.spec.completions == 2
    assert job.spec.completionMode == "Indexed"  # the controller then sets JOB_COMPLETION_INDEX
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "1")
    assert K8sCluster.get_process_id() == 1

    rules = objects["Role"]["rules"]
    allowed = {
        (group, kind, verb)
        for rule in rules
        for group in rule["apiGroups"]
        for kind in rule["resources"]
        for verb in rule["verbs"]
    }
    assert asked and asked <= allowed
    account = objects["ServiceAccount"]["metadata"]["name"]
    assert replicated["template"]["spec"]["template"]["spec"]["serviceAccountName"] == account
    assert objects["RoleBinding"]["subjects"][0]["name"] == account
    assert objects["RoleBinding"]["roleRef"]["name"] == objects["Role"]["metadata"]["name"]
