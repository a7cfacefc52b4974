import errno
import fcntl
import json
import os
import re
import signal
import subprocess
import sys

import pytest

from errors import UserError
from telemetry.run_lock import lock_run

HOLD = """
import os, sys, time
from pathlib import Path
from telemetry.run_lock import lock_run
lock = lock_run(Path(sys.argv[1]))
if os.fork() == 0:  # The child outlives its parent, and shall not keep the lock.
    print(os.getpid(), flush=True)
time.sleep(60)
"""


def test_a_second_start_is_refused_until_the_first_has_ended(tmp_path, monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    folder = tmp_path / "a" / "run"
    environment = os.environ | {"SLURM_JOB_ID": "77", "USER": "ada"}
    command = [sys.executable, "-c", HOLD, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as holder:
        child = int(holder.stdout.readline())
        with pytest.raises(UserError) as refusal:
            lock_run(folder)
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        lock = lock_run(folder)  # The child is still there.
        os.kill(child, signal.SIGKILL)
    assert re.fullmatch(
        rf"job\.dump_folder: {folder} is in use by pid {holder.pid} on host \S+ since \S+ \(user ada, SLURM job 77\): "
        r"stop that run, or choose another job\.dump_folder",
        str(refusal.value),
    )
    told = json.loads((folder / "run.lock").read_text())
    assert told["pid"] == os.getpid() and "job" not in told
    lock.close()


def test_a_folder_by_another_name_is_the_same_folder(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "run")
    with lock_run(tmp_path / "run"), pytest.raises(UserError, match=f"link is in use by pid {os.getpid()} on host"):
        lock_run(tmp_path / "link")
    lock_run(tmp_path / "link").close()


def test_the_lock_is_not_inherited(tmp_path):
    with lock_run(tmp_path) as lock:
        assert not os.get_inheritable(lock.fileno())


def test_what_a_dead_holder_left_does_not_matter(tmp_path):
    (tmp_path / "run.lock").write_text("not JSON")
    with lock_run(tmp_path):
        assert json.loads((tmp_path / "run.lock").read_text())["command"]


def test_a_holder_that_has_not_written_yet(tmp_path):
    with (tmp_path / "run.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="is in use by another run: stop"):
            lock_run(tmp_path)


@pytest.mark.parametrize("folder", ["file", "file/run", "dangling"])
def test_a_folder_that_cannot_be_written(tmp_path, folder):
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere" / "run")
    with pytest.raises(UserError, match=rf"job\.dump_folder: \S+{folder} cannot be written \(.+\): choose another"):
        lock_run(tmp_path / folder)


def test_a_file_system_without_locks_is_warned_of(tmp_path, monkeypatch, caplog):
    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    lock_run(tmp_path).close()
    assert [record.message for record in caplog.records] == [
        f"{tmp_path}: this file system has no locks (ENOLCK): nothing keeps a second run out of the folder"
    ]
