"""The settings of spark-conf, given to the code of Spark that reads them, without a cluster.

Goal: no setting that Spark does not know, or that repeats what it does anyway; and pods on
Kubernetes in which dlog has what it needs.  Method: a job is submitted with the settings for
Kubernetes to an API server that notes what it is asked to make; with the properties that the
driver would find in its pod, Spark makes the pod of an executor.
"""

from __future__ import annotations

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest

from tests.fixtures.deployment import SPARK_HOME
from tests.fixtures.spark import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]
CONF = ROOT / "spark-conf"
NOT_REGISTERED = {"spark.master"}
"""Read by its name."""
NAMED_BY_USERS = (".secrets.", ".volumes.")
"""In such keys is a name of the user's: pods show that they are understood."""
MEMORY_MI = 1024


@pytest.fixture(scope="module")
def jvm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A Java with Spark's classes, and no session."""
    from pyspark.java_gateway import launch_gateway

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARK_HOME", str(SPARK_HOME))
        patch.setenv("KUBECONFIG", str(tmp_path_factory.mktemp("kube") / "none"))
        patch.setenv("SPARK_LOCAL_IP", "127.0.0.1")
        patch.delenv("SPARK_CONF_DIR", raising=False)
        gateway = launch_gateway()  # type: ignore[no-untyped-call]
    try:
        yield gateway.jvm
    finally:
        gateway.shutdown()
        gateway.proc.stdin.close()  # by which it knows that it is not needed
        gateway.proc.wait()


def settings_of(place: str) -> dict[str, str]:
    """Return the settings of a file by their keys."""
    lines = (CONF / place / "spark-defaults.conf").read_text().splitlines()
    return dict(line.split() for line in lines if line and not line.startswith("#"))


@pytest.mark.parametrize("place", ["local", "standalone", "kubernetes"])
def test_spark_knows_each_setting_and_would_not_do_so_anyway(jvm: Any, place: str) -> None:
    """Each key is one that Spark has declared, with a value other than the default."""
    for module in ("internal.config.package$", "sql.internal.SQLConf$", "deploy.k8s.Config$"):
        jvm.java.lang.Class.forName(f"org.apache.spark.{module}")  # declares its settings
    find = jvm.org.apache.spark.internal.config.ConfigEntry.findEntry
    settings = settings_of(place)
    for key in settings.keys() - NOT_REGISTERED:
        if not any(part in key for part in NAMED_BY_USERS):
            entry = find(key)
            assert entry is not None, f"Spark has no {key}"
            assert entry.defaultValueString() != settings[key], f"{key} is so by default"


class ApiServer(ThreadingHTTPServer):
    """The API of Kubernetes: takes all objects that it shall make, and notes them by kind."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Request)
        self.made: dict[str, dict[str, Any]] = {}

    @property
    def master(self) -> str:
        """Where it listens, as Spark's master."""
        return f"k8s://http://127.0.0.1:{self.server_port}"


class _Request(BaseHTTPRequestHandler):
    server: ApiServer

    def do_POST(self) -> None:
        """Make something."""
        thing = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.made[thing["kind"]] = thing
        thing["metadata"]["uid"] = thing["kind"]
        self.send_response(201)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(thing).encode())

    do_PATCH = do_POST

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def api_server() -> Iterator[ApiServer]:
    """Run one."""
    with ApiServer() as server:
        thread = threading.Thread(target=server.serve_forever, name="api-server")
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.prove  # the test below asks Spark about each setting
def test_pods_are_as_the_settings_for_kubernetes_say(jvm: Any) -> None:
    """The settings of the driver and of executors, and what the driver gets there."""
    with api_server() as server:
        words = ["--properties-file", str(CONF / "kubernetes" / "spark-defaults.conf")]
        words += ["--master", server.master]
        words += ["--conf", "spark.kubernetes.submission.waitAppCompletion=false"]
        words += ["local:///opt/job.py"]
        arguments = jvm.java.lang.reflect.Array.newInstance(
            jvm.java.lang.Class.forName("java.lang.String"), len(words)
        )
        for number, word in enumerate(words):
            arguments[number] = word
        jvm.org.apache.spark.deploy.SparkSubmit().doSubmit(arguments)
        made = server.made

    driver = made["Pod"]["spec"]
    assert driver["serviceAccountName"] == "spark"
    _check_pod(driver)
    properties = jvm.java.util.Properties()
    properties.load(jvm.java.io.StringReader(made["ConfigMap"]["data"]["spark.properties"]))
    settings = settings_of("kubernetes")
    for key in settings.keys() - {"spark.master"}:
        assert properties.getProperty(key) == settings[key]

    executor = json.loads(_executor_pod(jvm, properties))["spec"]
    _check_pod(executor)
    (container,) = executor["containers"]
    overhead_mi = int(settings["spark.executor.memoryOverhead"].removesuffix("m"))
    assert container["resources"]["limits"]["memory"] == f"{MEMORY_MI + overhead_mi}Mi"


def _check_pod(pod: dict[str, Any]) -> None:
    """See the image, the claim for checkpoints and the secret, each where it belongs."""
    (container,) = pod["containers"]
    assert container["image"] == "registry.example.com/spark-dlog:4.3.0"
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    places = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    assert places["/checkpoints"]["persistentVolumeClaim"]["claimName"] == "checkpoints"
    assert places["/etc/dlog-tls"]["secret"]["secretName"] == "dlog-tls"


def _executor_pod(jvm: Any, properties: Any) -> str:
    """Return the pod of an executor, as a driver with these properties has it made."""
    spark = jvm.org.apache.spark
    conf = spark.SparkConf(False)
    for key in properties.stringPropertyNames():
        conf.set(key, properties.getProperty(key))
    none = jvm.scala.Option.empty()
    profiles = getattr(getattr(spark.resource, "ResourceProfile$"), "MODULE$")
    profile = profiles.getOrCreateDefaultProfile(conf)
    ciphers = getattr(spark.SecurityManager, "$lessinit$greater$default$3")()
    security = spark.SecurityManager(conf, none, ciphers)
    kubernetes = spark.deploy.k8s.KubernetesConf
    asked = kubernetes.createExecutorConf(conf, "1", "app", none, profile.id())
    client = jvm.io.fabric8.kubernetes.client.KubernetesClientBuilder().build()
    try:
        builder = spark.scheduler.cluster.k8s.KubernetesExecutorBuilder()
        built = builder.buildFromFeatures(asked, security, client, profile)
    finally:
        client.close()
    pod = built.pod()
    spec = jvm.io.fabric8.kubernetes.api.model.PodBuilder(pod.pod()).editSpec()
    spec = spec.withContainers([pod.container()]).endSpec().build()
    return str(jvm.io.fabric8.kubernetes.client.utils.Serialization.asJson(spec))
