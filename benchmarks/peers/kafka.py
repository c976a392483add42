"""A Kafka of three servers on this machine, from the jars that Maven brings, and Spark's way to it.

Three brokers, the first of which is the controller too, each with the settings of Kafka's own start
script.  A topic has three replicas; a write with ``acks=all`` waits for those in sync, two at
least.  Kafka leaves it to the operating system when bytes go to the disk; `is_synced` makes it sync
each batch before it acknowledges, as bookies do.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pyspark

from dlcore.base.errors import ConfigurationError
from dlcore.ops.sandbox.process import HOST, ChildProcess, PortReservation, Warden, wait_until
from dlcore.ops.sandbox.zookeeper import find_java

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pyspark.sql import DataFrame, SparkSession

BROKERS = 3
PARTITIONS = 2
"""The partitions of a topic: more than one order needs, as users of Kafka would take them."""
_SERVER = ("org.apache.kafka:kafka_2.13:4.1.1", "org.apache.logging.log4j:log4j-slf4j-impl:2.24.3")
_CONNECTOR = "org.apache.spark:spark-sql-kafka-0-10_2.13"
_CONNECTOR_PARTS = (
    "spark-sql-kafka-0-10_2.13",
    "spark-token-provider-kafka-0-10_2.13",
    "kafka-clients",
    "commons-pool2",
)
"""The packages that PySpark does not have already."""
CONNECTOR_VERSION = os.environ.get("CONNECTOR") or pyspark.__version__
_DEPENDENCY = """\
    <dependency>
      <groupId>{}</groupId><artifactId>{}</artifactId><version>{}</version>{}
    </dependency>
"""
_PROJECT = """\
<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>dlog</groupId><artifactId>peers</artifactId><version>1</version>
  <dependencies>
{}  </dependencies>
</project>
"""
_JVM_OPTIONS = (
    "-server",
    "-Xms1g",
    "-Xmx1g",
    "-XX:+UseG1GC",
    "-XX:MaxGCPauseMillis=20",
    "-XX:InitiatingHeapOccupancyPercent=35",
    "-Djava.awt.headless=true",
    "-Dlog4j2.level=INFO",
)
_CONFIG = """\
process.roles={roles}
node.id={node}
controller.quorum.voters=1@{host}:{controller}
controller.listener.names=CONTROLLER
listeners=PLAINTEXT://{host}:{port}{also}
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT
log.dirs={data_dir}
min.insync.replicas=2
auto.create.topics.enable=false
{synced}
"""
_CLUSTER_ID = "ZGxvZy1iZW5jaG1hcms5OQ"
_STARTED = "Kafka Server started"
_START_TIMEOUT_S = 120.0


@cache
def class_path(*coordinates: str, only: tuple[str, ...] = ()) -> str:
    """Return the jars of these artifacts and of what they need, which Maven keeps in its own cache.

    An artifact is `group:name:version`, and `:classifier` where it has one.  `only` names the
    artifacts to take of all these.

    Raises:
        ConfigurationError: Maven is missing, or does not find one.
    """
    maven = shutil.which("mvn")
    if maven is None:
        raise ConfigurationError(
            "mvn was not found in PATH: it installs Kafka and Spark's connector to it; "
            "install it, for example: apt-get install maven"
        )
    with tempfile.TemporaryDirectory(prefix="peers-") as folder:
        project, found = Path(folder) / "pom.xml", Path(folder) / "classpath"
        project.write_text(_PROJECT.format("".join(map(_dependency, coordinates))))
        command = [maven, "-q", "-B", "-f", str(project), "dependency:build-classpath"]
        command += ["-DincludeScope=runtime", f"-Dmdep.outputFile={found}"]
        command += [f"-DincludeArtifactIds={','.join(only)}"] if only else []
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            output = next((line for line in done.stdout.splitlines() if "[ERROR]" in line), "")
            raise ConfigurationError(
                f"Maven brings no {', '.join(coordinates)}: {output}\n"
                "for another version of Spark's connector: make bench-peers CONNECTOR=4.2.0"
            )
        return found.read_text().strip()


def _dependency(coordinates: str) -> str:
    group, name, version, *classifier = coordinates.split(":")
    more = "".join(f"<classifier>{each}</classifier>" for each in classifier)
    return _DEPENDENCY.format(group, name, version, more)


def connector_class_path() -> str:
    """Return the jars of Spark's connector, by default of the version of the installed PySpark.

    Raises:
        ConfigurationError: Maven is missing, or has no such version.
    """
    return class_path(f"{_CONNECTOR}:{CONNECTOR_VERSION}", only=_CONNECTOR_PARTS)


@contextmanager
def running_kafka(folder: Path, *, is_synced: bool) -> Iterator[str]:
    """Run three servers with their data and logs in `folder`; yield where they listen."""
    java = [find_java(), *_JVM_OPTIONS, "-cp", class_path(*_SERVER)]
    with ExitStack() as stack:
        reserved = [PortReservation(0) for _ in range(BROKERS + 1)]
        for each in reserved:
            stack.callback(each.release)
        controller, *ports = (each.port for each in reserved)
        warden = Warden()
        stack.callback(warden.close)  # kills them: what they hold is not needed any more
        servers = []
        for node, port in enumerate(ports, 1):
            home = folder / f"kafka-{node}"
            home.mkdir(parents=True)
            config = _write_config(home, node, port, controller, is_synced=is_synced)
            formatting = ["kafka.tools.StorageTool", "format", "-t", _CLUSTER_ID, "-c", config]
            subprocess.run([*java, *formatting], check=True, capture_output=True)
            server = ChildProcess(
                [*java, "kafka.Kafka", config], log_path=home / "log", warden=warden
            )
            stack.callback(server.kill)
            servers.append(server)
        for server in servers:
            _wait_for(server)
        yield ",".join(f"{HOST}:{port}" for port in ports)


def _write_config(home: Path, node: int, port: int, controller: int, *, is_synced: bool) -> str:
    is_controller = node == 1
    text = _CONFIG.format(
        node=node,
        host=HOST,
        port=port,
        controller=controller,
        data_dir=home / "data",
        roles="broker,controller" if is_controller else "broker",
        also=f",CONTROLLER://{HOST}:{controller}" if is_controller else "",
        synced="log.flush.interval.messages=1" if is_synced else "",
    )
    path = home / "server.properties"
    path.write_text(text)
    return str(path)


def _wait_for(server: ChildProcess) -> None:
    settled = wait_until(
        lambda: not server.is_running or _STARTED in server.output(), timeout_s=_START_TIMEOUT_S
    )
    if not (settled and server.is_running):
        raise ConfigurationError(f"Kafka does not serve: {server.describe_end()}")


class Kafka:
    """Topics of a running Kafka, by the client that the connector brought into Spark's driver.

    `producer` are options of each batch write.
    """

    def __init__(self, spark: SparkSession, servers: str, producer: Mapping[str, str]) -> None:
        self.options = {"kafka.bootstrap.servers": servers}
        """The options of each read and write."""
        self._spark = spark
        self._producer = dict(producer)
        jvm: Any = spark.sparkContext._jvm
        self._java = jvm.java
        self._clients = jvm.org.apache.kafka.clients
        serializer = "org.apache.kafka.common.serialization.ByteArraySerializer"
        self._settings = self._java.util.HashMap()
        self._settings.put("bootstrap.servers", servers)
        self._settings.put("key.serializer", serializer)
        self._settings.put("value.serializer", serializer)

    def create(self) -> str:
        """Create a topic and return its name."""
        name = f"bench-{uuid4().hex}"
        copies = self._java.lang.Short.valueOf(str(BROKERS))
        with self._admin() as admin:
            admin.createTopics([self._clients.admin.NewTopic(name, PARTITIONS, copies)]).all().get()
        return name

    def drop(self, name: str) -> None:
        """Delete a topic, so that rounds do not fill the disk."""
        with self._admin() as admin:
            admin.deleteTopics([name]).all().get()

    def write(self, rows: DataFrame, name: str) -> None:
        """Append rows as a batch."""
        options = {**self.options, **self._producer, "topic": name}
        rows.write.format("kafka").options(**options).mode("append").save()

    def read(self, name: str) -> DataFrame:
        """Return all of a topic, with all columns."""
        options = {**self.options, "subscribe": name, "minPartitions": str(PARTITIONS)}
        return self._spark.read.format("kafka").options(**options).load()

    @contextmanager
    def _admin(self) -> Iterator[Any]:
        admin = self._clients.admin.Admin.create(self._settings)
        try:
            yield admin
        finally:
            admin.close()

    @contextmanager
    def producing(self, topic: str) -> Iterator[Any]:
        """Yield a function that writes one value and returns once it is acknowledged by all."""
        producer = self._clients.producer.KafkaProducer(self._settings)

        def write(value: bytes) -> None:
            producer.send(self._clients.producer.ProducerRecord(topic, value)).get()

        try:
            yield write
        finally:
            producer.close()
