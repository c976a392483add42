import java.io.BufferedOutputStream;
import java.io.DataOutputStream;
import java.io.IOException;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.List;
import java.util.Properties;
import java.util.concurrent.Semaphore;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;
import org.apache.kafka.common.serialization.ByteArraySerializer;

/** Kafka's own client, which reads, follows or writes one topic on command; see ../README.md. */
public final class KafkaClient {
  private static final int RECORD_BYTES = 100;
  private static final int AHEAD_MAX = 2000;
  private static volatile boolean isEnded = false;

  public static void main(String[] arguments) throws Exception {
    Thread end = new Thread(KafkaClient::awaitEnd);
    end.setDaemon(true);
    end.start();
    Properties settings = new Properties();
    settings.put("bootstrap.servers", arguments[1]);
    settings.put("reconnect.backoff.max.ms", "200");
    settings.put("retry.backoff.ms", "100");
    settings.put("retry.backoff.max.ms", "200");
    String topic = arguments[2];
    switch (arguments[0]) {
      case "read" -> read(settings, topic, Long.parseLong(arguments[3]));
      case "subscribe" -> subscribe(settings, topic, arguments[3], Integer.parseInt(arguments[4]));
      case "write" -> write(settings, topic, arguments[3]);
      default -> throw new IllegalArgumentException(arguments[0]);
    }
  }

  /** The end of the standard input is the end of the work. */
  private static void awaitEnd() {
    try {
      while (System.in.read() >= 0) {}
    } catch (IOException error) {
      throw new IllegalStateException(error);
    } finally {
      isEnded = true;
    }
  }

  private static KafkaConsumer<byte[], byte[]> consumer(Properties settings) {
    settings.put("auto.offset.reset", "earliest");
    settings.put("enable.auto.commit", "false");
    settings.put("max.poll.records", "10000");
    return new KafkaConsumer<>(
        settings, new ByteArrayDeserializer(), new ByteArrayDeserializer());
  }

  private static void read(Properties settings, String topic, long offset) throws IOException {
    try (KafkaConsumer<byte[], byte[]> consumer = consumer(settings)) {
      TopicPartition partition = new TopicPartition(topic, 0);
      consumer.assign(List.of(partition));
      consumer.seek(partition, offset);
      DataOutputStream out = framed();
      while (!isEnded) {
        for (ConsumerRecord<byte[], byte[]> record : consumer.poll(Duration.ofMillis(100))) {
          frame(out, record);
        }
        out.flush();
      }
    }
  }

  private static void subscribe(Properties settings, String topic, String group, int count)
      throws IOException {
    settings.put("group.id", group);
    settings.put("max.poll.records", "1");
    try (KafkaConsumer<byte[], byte[]> consumer = consumer(settings)) {
      settings.put("max.poll.records", "1");
      consumer.subscribe(List.of(topic));
      DataOutputStream out = framed();
      long last = -1;
      for (int found = 0; found < count && !isEnded; ) {
        for (ConsumerRecord<byte[], byte[]> record : consumer.poll(Duration.ofMillis(100))) {
          if (found++ < count) {
            frame(out, record);
            last = record.offset();
          }
        }
        out.flush();
      }
      consumer.commitSync(
          java.util.Map.of(
              new TopicPartition(topic, 0),
              new org.apache.kafka.clients.consumer.OffsetAndMetadata(last + 1)));
    }
  }

  private static DataOutputStream framed() {
    return new DataOutputStream(new BufferedOutputStream(System.out, 1 << 20));
  }

  private static void frame(DataOutputStream out, ConsumerRecord<byte[], byte[]> record)
      throws IOException {
    out.writeLong(record.offset());
    out.writeInt(record.value().length);
    out.write(record.value());
  }

  private static void write(Properties settings, String topic, String codec) throws Exception {
    settings.put("compression.type", codec);
    settings.put("linger.ms", "2");
    settings.put("batch.size", "4096");
    settings.put("delivery.timeout.ms", "240000");
    PrintStream out = new PrintStream(System.out, false, StandardCharsets.UTF_8);
    Semaphore ahead = new Semaphore(AHEAD_MAX);
    int number = 0;
    try (KafkaProducer<byte[], byte[]> producer =
        new KafkaProducer<>(settings, new ByteArraySerializer(), new ByteArraySerializer())) {
      for (; !isEnded; number++) {
        String begin = number + ":";
        byte[] value =
            (begin + "x".repeat(RECORD_BYTES - begin.length())).getBytes(StandardCharsets.UTF_8);
        int mine = number;
        ahead.acquire();
        producer.send(
            new ProducerRecord<>(topic, value),
            (metadata, error) -> {
              synchronized (out) {
                out.println(
                    error == null
                        ? "written " + mine + " " + metadata.offset()
                        : "error " + mine + " " + error);
                out.flush();
              }
              ahead.release();
            });
      }
      producer.flush();
    }
    out.println("sent " + number);
    out.flush();
  }
}
