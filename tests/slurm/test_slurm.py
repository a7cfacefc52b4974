"""A real Slurm on this machine, with two nodes: a run is submitted, preempted, paused, and trains on as if nothing had
happened. Needs root, and Debian's slurm-wlm and munge: apt-get install slurm-wlm munge
"""

import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from scripts.local_ranks import free_port

ROOT = Path(__file__).parent.parent.parent
MISSING = [name for name in ("munged", "slurmctld", "slurmd", "sbatch") if shutil.which(name) is None]
pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)} (slurm-wlm and munge have them)"),
    pytest.mark.skipif(os.geteuid() != 0, reason="Slurm's daemons are started as root"),
    pytest.mark.timeout(240),
]
STEPS = 150
FLAGS = (
    "--config debug.toml --model.n_layers 1 --training.seq_len 128 --training.local_batch_size 2 "
    f"--training.global_batch_size 4 --training.steps {STEPS} --checkpoint.interval 1000 --metrics.log_freq 1 "
    "--metrics.enable_tensorboard false --validation.enable false"
).split()

# cred_expire is how long a requeued job waits: 120 s if it is not set, 5 s at least.
# The nodes are two daemons on two ports. A job's id makes its rendezvous' port: two Slurms here must differ.
CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
FirstJobId={first}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=bf_interval=1,sched_interval=1,sched_min_interval=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
KillWait=5
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=60
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF
"""


class Cluster:
    """Munge, a controller and two nodes, in a folder of their own."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-"))  # Short: a socket's path has 107 bytes.
        self.folder.chmod(0o755)
        self.env = os.environ | {"SLURM_CONF": str(self.folder / "slurm.conf"), "OMP_NUM_THREADS": "1"}
        self.daemons: list[subprocess.Popen] = []

    def start(self) -> None:
        munge, conf = self.folder / "munge", self.folder / "slurm.conf"
        munge.mkdir()
        (munge / "key").write_bytes(os.urandom(128))
        (munge / "key").chmod(0o400)
        for path in (munge, munge / "key"):
            shutil.chown(path, "munge", "munge")
        (self.folder / "state").mkdir()
        ports, first = [free_port() for _ in range(3)], random.randrange(1, 1_000_000)
        conf.write_text(CONF.format(folder=self.folder, host=socket.gethostname(), ports=ports, first=first))
        files = [f"--{name}-file={munge}/{name}" for name in ("key", "log", "pid", "seed")]
        self.daemon("munged", "--foreground", "--force", f"--socket={munge}/socket", *files, user="munge")
        self.until(lambda: (munge / "socket").exists(), 10, "munge")
        self.daemon("slurmctld", "-D")
        for node in ("n1", "n2"):
            self.daemon("slurmd", "-D", "-N", node)
        self.until(lambda: self.states() == {"n1 idle", "n2 idle"}, 30, "the nodes")

    def states(self) -> set[str]:
        return set(self("sinfo", "--noheader", "--Node", "--format=%N %t", check=False).splitlines())

    def daemon(self, *command: str, user: str | None = None) -> None:
        log = (self.folder / f"{command[0]}-{len(self.daemons)}.log").open("w")
        self.daemons.append(
            subprocess.Popen(command, env=self.env, stdout=log, stderr=log, user=user, group=user, extra_groups=[])
        )

    def stop(self) -> None:
        if len(self.daemons) == 4:
            self("scancel", "--user=root", check=False)
            deadline = time.monotonic() + 15
            while self("squeue", "--noheader", check=False) and time.monotonic() < deadline:
                time.sleep(0.2)
        for daemon in reversed(self.daemons):
            daemon.terminate()
            daemon.wait(20)
        shutil.rmtree(self.folder)

    def __call__(self, *command: str, check: bool = True) -> str:
        done = subprocess.run(command, cwd=ROOT, env=self.env, capture_output=True, text=True)
        assert done.returncode == 0 or not check, done
        return done.stdout

    def until(self, holds: Callable[[], bool], seconds: float, what: str, log: Path | None = None) -> None:
        deadline = time.monotonic() + seconds
        while not holds():
            logs = [log] if log is not None else sorted(self.folder.glob("*.log"))
            tails = "\n".join(f"{path}:\n{path.read_text()[-3000:]}" for path in logs if path.exists())
            assert time.monotonic() < deadline, f"{what} did not come within {seconds} s\n{tails}"
            time.sleep(0.1)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    made = Cluster()
    try:
        made.start()
        yield made
    finally:
        made.stop()


class Launched:
    """A run that scripts.launch has submitted."""

    def __init__(self, cluster: Cluster, folder: Path, *options: str):
        flags = [*FLAGS[2:], "--job.dump_folder", str(folder)]
        said = cluster(sys.executable, "-m", "scripts.launch", *FLAGS[:2], *options, "--", *flags)
        self.cluster, self.folder = cluster, folder
        self.number = re.findall(r"job (\d+) is queued", said)[0]
        self.log = folder / "logs" / f"slurm-{self.number}.txt"

    def until(self, holds: Callable[[], bool], seconds: float, what: str) -> None:
        self.cluster.until(holds, seconds, what, self.log)

    def text(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def facts(self) -> dict[str, str]:
        words = self.cluster("scontrol", "--oneliner", "show", "job", self.number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def losses(self) -> dict[int, float]:
        lines = [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]
        return {line["step"]: line["loss"] for line in lines}


def test_a_run_is_preempted_and_paused_and_loses_nothing(cluster, tmp_path):
    run = Launched(cluster, tmp_path / "run", "--nodes", "2", "--cpu-ranks-per-node", "1", "--partition", "low")
    # The same on one node, left alone; it begins after the other has ended well.
    alone = Launched(cluster, tmp_path / "alone", "--cpu-ranks-per-node", "2", "--after", run.number)

    run.until(lambda: re.search(r"step +10 ", run.text()) is not None, 60, "a step")
    cluster("sbatch", "--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=true")
    run.until(lambda: "SIGTERM: stopping after step" in run.text(), 30, "the preemption")
    run.until(lambda: "resumed after step" in run.text(), 60, "the second start")
    # What Slurm does before the time limit.
    cluster("scancel", "--batch", "--signal=USR1", run.number)
    run.until(lambda: "SIGUSR1: stopping after step" in run.text(), 30, "the pause")
    run.until(lambda: run.text().count("resumed after step") == 2, 60, "the third start")
    assert alone.facts()["JobState"] == "PENDING"
    run.until(lambda: run.facts()["JobState"] == "COMPLETED", 60, "the end")

    stopped = re.findall(r"stopping after step (\d+)", run.text())
    assert stopped == re.findall(r"resumed after step (\d+)", run.text())
    assert 10 <= int(stopped[0]) < int(stopped[1]) < STEPS
    assert run.facts()["Restarts"] == "2"
    starts = [run.folder / "logs" / f"{run.number}.{start}" for start in range(3)]
    for node in ("n1", "n2"):
        assert all(list((start / node).rglob("stdout.log")) for start in starts)

    alone.until(lambda: alone.facts()["JobState"] == "COMPLETED", 60, "the run left alone")
    assert alone.facts()["Restarts"] == "0"
    assert list(alone.losses()) == list(range(1, STEPS + 1))
    assert run.losses() == alone.losses()


def test_a_run_that_fails_is_not_requeued(cluster, tmp_path):
    run = Launched(cluster, tmp_path / "run", "--cpu-ranks-per-node", "1", "--sbatch=--hold")
    (config,) = run.folder.glob("launch-*.toml")
    config.write_text("nonsense")
    cluster("scontrol", "release", run.number)
    run.until(lambda: run.facts()["JobState"] == "FAILED", 60, "the failure")
    assert run.facts()["Restarts"] == "0" and "not valid TOML" in run.text()
