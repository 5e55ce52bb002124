"""The steps of docs/deploy.md for two nodes on this machine, run inside namespaces of their own.

`ray up` and `ray down` end Ray processes by name: here they see no others. The network is a loopback of its own, so
every port is free. Called by ``test_ray_up`` as ``python -m tests.support.cluster_steps FOLDER``; writes what it
saw to FOLDER/result.json.
"""

import contextlib
import getpass
import importlib.metadata
import json
import os
import pwd
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import yaml
from ray.dashboard.modules.serve.sdk import ServeSubmissionClient

ROOT = Path(__file__).resolve().parents[2]
SSHD = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:/sbin:/usr/bin") or ""
DASHBOARD, URL = "http://127.0.0.1:8265", "http://127.0.0.1:8000"


def run(folder: Path, *command: str) -> str:
    """One command line of the documentation; its output also goes to FOLDER/steps.log."""
    with (folder / "steps.log").open("a") as log:
        log.write(f"\n$ {shlex.join(command)}\n")
        log.flush()
        done = subprocess.run(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=400
        )
        log.write(done.stdout)
    assert done.returncode == 0, f"{shlex.join(command)}: status {done.returncode}\n{done.stdout[-3000:]}"
    return done.stdout


def until(question: Callable[[], bool], limit_s: float, what: str) -> None:
    """Poll with a bound; errors while something starts count as no."""
    give_up_s = time.monotonic() + limit_s
    while True:
        with contextlib.suppress(Exception):
            if question():
                return
        assert time.monotonic() < give_up_s, f"{what}: not within {limit_s:g} s"
        time.sleep(0.5)


def make_home(folder: Path) -> None:
    """The home directory of the nodes' user, with an environment in which all of the lock file is installed already.

    The namespaces have no way to a package index: `make setup` finds every package in the environment of this test run.
    """
    home = folder / "home"
    (home / "polyslo").mkdir(parents=True)
    (home / ".bashrc").touch()
    user = pwd.getpwuid(os.getuid())
    lines = Path("/etc/passwd").read_text().splitlines(keepends=True)
    mine = ":".join((*map(str, user[:5]), str(home), user.pw_shell)) + "\n"
    (folder / "passwd").write_text("".join(mine if line.startswith(f"{user.pw_name}:") else line for line in lines))
    subprocess.run(["mount", "--bind", str(folder / "passwd"), "/etc/passwd"], check=True)  # in this namespace only
    venv = home / "polyslo" / ".venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    (site,) = (venv / "lib").glob("python*/site-packages")
    (own,) = {path for path in sys.path if Path(path, "ray", "__init__.py").exists()}
    (site / "test-run.pth").write_text(f"{own}\n")
    for name in ("ray", "serve"):
        (entry,) = importlib.metadata.entry_points(group="console_scripts", name=name)
        script = venv / "bin" / name
        script.write_text(f"#!{venv}/bin/python\nimport {entry.module}\n{entry.value.replace(':', '.')}()\n")
        script.chmod(0o755)


@contextlib.contextmanager
def ssh_server(folder: Path) -> Iterator[Path]:
    """An sshd on this namespace's port 22 that lets the returned key in."""
    for name in ("host_key", "key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    kernels = os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))
    surroundings = {"RAY_TMPDIR": folder, "TMPDIR": folder, "XDG_CACHE_HOME": kernels}
    lines = {
        "HostKey": folder / "host_key",
        "AuthorizedKeysFile": folder / "key.pub",
        "StrictModes": "no",
        "UsePAM": "no",
        "PidFile": "none",
        "Subsystem": "sftp internal-sftp",
        "SetEnv": " ".join(f"{name}={value}" for name, value in surroundings.items()),
    }
    config = folder / "sshd_config"
    config.write_text("".join(f"{name} {value}\n" for name, value in lines.items()))
    Path("/run/sshd").mkdir(parents=True, exist_ok=True)
    server = subprocess.Popen([SSHD, "-D", "-f", str(config), "-E", str(folder / "sshd.log")])
    try:
        yield folder / "key"
    finally:
        server.terminate()
        server.wait(10)


def cluster_file(folder: Path, key: Path) -> Path:
    """``cluster-local.yaml`` with this test's user and key, which is all that a newcomer fills in."""
    cluster = yaml.safe_load((ROOT / "cluster-local.yaml").read_text())
    cluster["auth"] = {"ssh_user": getpass.getuser(), "ssh_private_key": str(key)}
    path = folder / "cluster.yaml"
    path.write_text(yaml.safe_dump(cluster, sort_keys=False))
    return path


def nodes_alive() -> int:
    answer = httpx.get(f"{DASHBOARD}/api/cluster_status", timeout=10).json()
    status = answer["data"]["clusterStatus"]["loadMetricsReport"]
    return len(status["usageByNode"])


def serve_and_ask(folder: Path, cluster: Path, seen: dict[str, Any]) -> None:
    """`serve deploy` on the head, and one request."""
    run(folder, "ray", "exec", str(cluster), "cd polyslo && serve deploy serve.yaml")
    until(lambda: live_replicas() == 2, 240, "both replicas serve")
    question = {"model": "embedded", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
    headers = {"x-slo-ttft-ms": "60000", "x-slo-tpot-ms": "1000"}
    answer = httpx.post(f"{URL}/v1/chat/completions", json=question, headers=headers, timeout=120)
    seen["answer"] = {"status": answer.status_code, **answer.json()}
    seen["replica_nodes"] = sorted(replica["node_ip"] for replica in deployments()["Replica"]["replicas"])
    seen["status"] = run(folder, "ray", "exec", str(cluster), "polyslo status --json")


def change_tiers(folder: Path, cluster: Path, seen: dict[str, Any]) -> None:
    """An edited tier table, copied to the head and deployed: applied in place."""
    before = replica_ids()
    document = yaml.safe_load((ROOT / "serve.yaml").read_text())
    table = document["applications"][0]["deployments"][0]["user_config"]
    table["version"] = 2
    table["tiers"].append({"name": "report", "e2e_ms": 60000})
    edited = folder / "serve.yaml"
    edited.write_text(yaml.safe_dump(document))
    run(folder, "ray", "rsync-up", str(cluster), str(edited), "~/polyslo/serve.yaml")
    run(folder, "ray", "exec", str(cluster), "cd polyslo && serve deploy serve.yaml")
    until(lambda: tier_names() == {"interactive", "standard", "report", "batch"}, 60, "the new tier")
    seen["same_replicas"] = replica_ids() == before


def live_replicas() -> int:
    replicas = httpx.get(f"{URL}/polyslo/status", timeout=10).json()["replicas"]
    return sum(replica["live"] and not replica.get("stale") for replica in replicas)


def tier_names() -> set[str]:
    return {tier["name"] for tier in httpx.get(f"{URL}/polyslo/status", timeout=10).json()["tiers"]}


def replica_ids() -> list[str]:
    return sorted(replica["replica_id"] for replica in deployments()["Replica"]["replicas"])


def deployments() -> dict[str, Any]:
    """What Serve runs."""
    details = ServeSubmissionClient(DASHBOARD).get_serve_details()
    return dict(details["applications"]["polyslo"]["deployments"])


def ray_processes() -> list[str]:
    """Command lines of Ray's own processes in this namespace."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().decode(errors="replace").split("\0")
            if words[0].endswith(("/raylet", "/gcs_server")) or words[0].startswith("ray::"):
                found.append(words[0])
    return found


def main(folder: Path) -> None:
    seen: dict[str, Any] = {}
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    os.environ |= {"RAY_TMPDIR": str(folder), "TMPDIR": str(folder)}
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    make_home(folder)
    with ssh_server(folder) as key:
        cluster = cluster_file(folder, key)
        run(folder, "ray", "up", "-y", "--no-config-cache", str(cluster))
        until(lambda: nodes_alive() == 2, 420, "the worker joins, which sets itself up first")
        seen["nodes"] = nodes_alive()
        serve_and_ask(folder, cluster, seen)
        change_tiers(folder, cluster, seen)
        seen["ray_up"] = len(ray_processes())
        run(folder, "ray", "down", "-y", str(cluster))
        until(lambda: not ray_processes(), 60, "`ray down` ends every process of Ray")
    (folder / "result.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
