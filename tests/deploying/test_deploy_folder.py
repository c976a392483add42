"""The files of `deploy/` say what the programs take: commands, settings, ports, paths of health.

systemd's own `systemd-analyze` and Kubernetes' schemas judge what they know; the rest is compared
with the code.
"""

from __future__ import annotations

import configparser
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.fixtures.bookie_process import REPOSITORY
from tests.fixtures.configuration_page import PROGRAMS
from tests.fixtures.pages import blocks_of
from tests.fixtures.shell import require_command

DEPLOY = REPOSITORY / "deploy"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
COMMON = DEPLOY / "systemd" / "dlog-.service.d" / "10-common.conf"
COMPOSE = DEPLOY / "container" / "compose.yaml"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
SYSTEMD = shutil.which("systemd-analyze")
EXPOSURE_MAX = 2.0
PORTS = {"9190": "bookie", "9191": "proxy", "9192": "autorecovery", "9193": "metadata"}
VARIABLES = {
    f"DLOG_{key}".upper() if table == "dlog" else f"DLOG_{table}_{key}".upper()
    for table, options in PROGRAMS.items()
    for key in options
}


def documents() -> list[dict[str, Any]]:
    """Return all manifests for Kubernetes."""
    return [each for path in MANIFESTS for each in yaml.safe_load_all(path.read_text())]


def kept(kind: str) -> list[dict[str, Any]]:
    """Return those of a kind."""
    found = [each for each in documents() if each["kind"] == kind]
    assert found
    return found


def workloads() -> list[dict[str, Any]]:
    """Return the templates of pods, with the replicas of each."""
    return [*kept("StatefulSet"), *kept("Deployment")]


def services() -> dict[str, dict[str, Any]]:
    """Return the services of the compose file."""
    found: dict[str, dict[str, Any]] = yaml.safe_load(COMPOSE.read_text())["services"]
    return found


@pytest.mark.skipif(SYSTEMD is None, reason="it comes with systemd")
def test_systemd_accepts_the_units_and_finds_them_confined(tmp_path: Path) -> None:
    """Each is verified, and its exposure is rated; only the place of the program is another."""
    assert SYSTEMD is not None
    root = tmp_path / "etc" / "systemd" / "system"
    for path in (*UNITS, COMMON):
        copy = root / path.relative_to(DEPLOY / "systemd")
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(path.read_text().replace("/opt/dlog/bin/dlog", sys.executable))
    units = [root / each.name for each in UNITS]
    for extra in ("", "NoSuchSetting=1"):
        with (root / COMMON.relative_to(DEPLOY / "systemd")).open("a") as file:
            file.write(f"[Service]\n{extra}\n")
        done = subprocess.run(
            [SYSTEMD, "verify", "--man=no", "--recursive-errors=no", *units],
            capture_output=True,
            text=True,
            check=False,
        )
        assert ("NoSuchSetting" in done.stderr) == bool(extra), done.stderr
        ours = [line for line in done.stderr.splitlines() if "dlog-" in line and not extra]
        assert not ours
    for unit in UNITS:
        command = [SYSTEMD, "security", "--offline=true", f"--root={tmp_path}", "--no-pager"]
        output = subprocess.run([*command, unit.name], capture_output=True, text=True, check=True)
        found = re.search(r"exposure level for \S+ ([\d.]+)", output.stdout)
        assert found is not None
        assert float(found[1]) <= EXPOSURE_MAX, output.stdout


def test_units_run_what_the_page_runs() -> None:
    """The commands are those that a test runs on three hosts, by the page on operating."""
    on_page = [block.text for block in blocks_of("docs/operating.md") if "bookie run" in block.text]
    (text,) = on_page
    lines = set(text.splitlines())
    for path in UNITS:
        unit = configparser.ConfigParser(interpolation=None, strict=False)
        unit.optionxform = str  # type: ignore[assignment,method-assign]
        unit.read_string(path.read_text())
        service = unit["Service"]
        name = path.stem.removeprefix("dlog-")
        command = service["ExecStart"].removeprefix("/opt/dlog/bin/")
        require_command(shlex.split(command)[1:])
        assert name == "metadata" or command in lines
        (asked,) = re.findall(r"127\.0\.0\.1:(\d+)/health/live", service["ExecStartPost"])
        assert PORTS[asked] == name
        assert f"127.0.0.1:{asked}" in service.get("Environment", command)
        variable = service.get("Environment", "").partition("=")[0]
        assert variable in VARIABLES or name == "metadata"
        # A metadata server takes no SIGHUP: it would end.
        assert ("ExecReload" in service) == (name != "metadata")


def test_the_compose_file_runs_real_commands() -> None:
    """Each has a health that is asked at its own port; ports are taken once; data is kept."""
    found = services()
    listened = []
    for name, service in found.items():
        words = shlex.split(service["command"])
        require_command(words)
        assert set(service["environment"]) <= VARIABLES
        assert service["read_only"]
        assert service["cap_drop"] == ["ALL"]
        assert (name == "metadata") == ("network_mode" not in service)
        ports = [words[at + 1] for at, word in enumerate(words) if word == "--port"]
        for address in (words[at + 1] for at, word in enumerate(words) if word == "--http-address"):
            assert f"http://{address}/health/live" in service["healthcheck"]["test"][-1]
            ports.append(address.rpartition(":")[2])
        listened += ports
        keeps = "--data-dir" in words
        assert keeps == bool(service.get("volumes"))
    assert len(listened) == len(set(listened))
    volumes = {each.partition(":")[0] for one in found.values() for each in one.get("volumes", ())}
    assert volumes == set(yaml.safe_load(COMPOSE.read_text())["volumes"])


@pytest.mark.parametrize("version", ["1.30", "1.37"])
def test_kubernetes_schemas_accept_the_manifests(version: str) -> None:
    """Strictly: an unknown field is refused, too."""
    for each in documents():
        kubernetes_validate.validate(each, version, strict=True)
    wrong = json.loads(json.dumps(kept("StatefulSet")[0]).replace('"replicas"', '"replica"'))
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, version, strict=True)


def test_pods_say_what_the_programs_take() -> None:
    """Commands, variables, ports, probes, and places of files that are mounted."""
    (shared,) = kept("ConfigMap")
    assert set(shared["data"]) <= VARIABLES
    for workload in workloads():
        pod = workload["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        require_command(container["args"])
        named = {each["name"]: each.get("value") for each in container["env"]}
        assert set(named) - {"POD_NAME"} <= VARIABLES
        ports = {each["name"]: each["containerPort"] for each in container["ports"]}
        program = container["args"][0]
        assert named[f"DLOG_{program}_HTTP_ADDRESS".upper()] == f"0.0.0.0:{ports['http']}"
        assert PORTS[str(ports["http"])] == program
        for variable, port in {"PORT": "client", "CONTROL_PORT": "control"}.items():
            if program == "bookie":
                assert int(named[f"DLOG_BOOKIE_{variable}"] or 0) == ports[port]
        probes = {key: container[f"{key}Probe"]["httpGet"] for key in ("startup", "liveness")}
        assert all(each == {"path": "/health/live", "port": "http"} for each in probes.values())
        assert container["readinessProbe"]["httpGet"]["path"] == "/health/ready"
        mounted = {each["mountPath"] for each in container["volumeMounts"]}
        places = [each for each in {**shared["data"], **named}.values() if each and each[0] == "/"]
        for place in places:
            assert any(place.startswith(f"{folder}/") for folder in mounted), place


def test_budgets_and_policies_choose_pods_that_exist() -> None:
    """Each workload has a budget, and a policy lets its callers to ports that it has."""
    labels = {
        each["metadata"]["name"]: each["spec"]["template"]["metadata"]["labels"]
        for each in workloads()
    }
    ports = {
        each["metadata"]["name"]: {
            port["name"]
            for container in each["spec"]["template"]["spec"]["containers"]
            for port in container["ports"]
        }
        for each in workloads()
    }

    def chosen(selector: dict[str, Any]) -> set[str]:
        wanted = selector["matchLabels"].items()
        return {name for name, own in labels.items() if wanted <= own.items()}

    budgets = [chosen(each["spec"]["selector"]) for each in kept("PodDisruptionBudget")]
    assert sorted(map(sorted, budgets)) == [[name] for name in sorted(labels)]
    names = {each["metadata"]["name"]: each["spec"]["serviceName"] for each in kept("StatefulSet")}
    for each in kept("Service"):
        (name,) = chosen({"matchLabels": each["spec"]["selector"]})
        assert {port["name"] for port in each["spec"]["ports"]} == ports[name]
        assert names[name] == each["metadata"]["name"]
    for policy in kept("NetworkPolicy"):
        those = chosen(policy["spec"]["podSelector"])
        assert those
        for rule in policy["spec"].get("ingress", ()):
            for port in rule["ports"]:
                assert all(port["port"] in ports[name] for name in those)


def test_the_page_makes_the_secrets_that_pods_name(tmp_path: Path) -> None:
    """Its commands run as they stand; `kubectl` is noted, and each of its files is there."""
    (block,) = [each for each in blocks_of("docs/deploying.md") if "kubectl" in each.text]
    noted = tmp_path / "kubectl"
    words = f"{sys.executable} -m dlcore.ops.cli"
    shims = f'dlog() {{ {words} "$@"; }}\nkubectl() {{ echo "$*" >> {noted}; }}\n'
    subprocess.run(
        ["bash", "-euo", "pipefail", "-c", shims + block.text],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        check=True,
    )
    *made, applied = noted.read_text().splitlines()
    assert applied == "apply -f deploy/kubernetes"
    secrets = {}
    for line in made:
        create, secret, generic, name, *files = line.split()
        assert (create, secret, generic) == ("create", "secret", "generic")
        pairs = dict(each.removeprefix("--from-file=").split("=") for each in files[:-3])
        assert all((tmp_path / path).is_file() for path in pairs.values())
        plain = [Path(each.removeprefix("--from-file=")) for each in files[-3:]]
        assert all((tmp_path / path).is_file() for path in plain)
        secrets[name] = {*pairs, *(path.name for path in plain)}
    (shared,) = kept("ConfigMap")
    for workload in workloads():
        spec = workload["spec"]
        pod = spec["template"]["spec"]
        (container,) = pod["containers"]
        found = next(each["secret"] for each in pod["volumes"] if "secret" in each)
        values = [*shared["data"].values(), *(each.get("value", "") for each in container["env"])]
        for value in (each for each in values if each.startswith("/etc/dlog/")):
            for number in range(spec["replicas"]):
                pod_name = f"{workload['metadata']['name']}-{number}"
                file = Path(value.replace("$(POD_NAME)", pod_name)).name
                assert file in secrets[found["secretName"]], (value, secrets)


def test_the_page_for_hosts_names_what_is_there() -> None:
    """Its commands of `dlog` are real, and each unit that it starts is in the folder."""
    hosts, containers, _ = [
        each for each in blocks_of("docs/deploying.md") if each.language == "sh"
    ]
    lines = [each for each in (hosts.text + containers.text).splitlines() if each[:5] == "dlog "]
    assert len(lines) == 3
    for line in lines:
        require_command(shlex.split(line)[1:])
    started = set(re.findall(r"dlog-[a-z]+(?= |')", hosts.text))
    assert started == {each.stem for each in UNITS} - {"dlog-metadata"}
    for path in re.findall(r"deploy/[\w./]+", hosts.text + containers.text):
        assert (REPOSITORY / path).exists()


@pytest.mark.parametrize(("column", "rate", "days"), [(3, 10_000, 3), (4, 100_000, 7)])
def test_the_sizes_are_those_of_the_arithmetic(column: int, rate: int, days: int) -> None:
    """Each number of the table follows from the first rows."""
    page = (REPOSITORY / "docs" / "deploying.md").read_text(encoding="utf-8")
    rows = [line.split("|") for line in page.partition("## Sizes")[2].splitlines()]
    found = {row[1].strip().partition(",")[0]: row[column].strip() for row in rows if len(row) == 6}

    def number(name: str) -> float:
        return float(re.findall(r"[\d,.]+", found[name])[0].rstrip(",").replace(",", ""))

    size, logs, bookies = (number(each) for each in ("bytes of a record", "logs", "bookies"))
    assert number("records a second") == rate
    assert found["kept for"] == f"{days} days"
    seconds, incoming = days * 86400, rate * (size + 13)
    segments = incoming * seconds / (256 * 2**20) + logs * seconds / 7200
    stored = 3 * incoming * seconds / bookies
    wanted = {
        "bytes a second": incoming / 1e6,
        "written by each bookie's disk": 3 * incoming / bookies / 1e6,
        "stored by each bookie": stored / 1e12,
        "disk of each bookie": stored * 4 / 3 / 1e12,
        "sent by each bookie for F readers of everything": incoming / bookies / 1e6,
        "sent by all proxies": 3 * incoming / 1e6,
        "segments kept": segments,
        "nodes in ZooKeeper": 2 * logs + 2 * segments,
        "ZooKeeper's heap for them": (2 * logs + 2 * segments) * 500 / 1e6,
    }
    for name, value in wanted.items():
        assert number(name) == pytest.approx(value, rel=0.02), name
