import com.fasterxml.jackson.databind.JsonNode;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.TimeUnit;
import org.apache.arrow.flight.CallOptions;
import org.apache.arrow.flight.CallStatus;
import org.apache.arrow.flight.FlightClient;
import org.apache.arrow.flight.FlightDescriptor;
import org.apache.arrow.flight.FlightRuntimeException;
import org.apache.arrow.flight.PutResult;
import org.apache.arrow.flight.SyncPutListener;
import org.apache.arrow.memory.ArrowBuf;
import org.apache.arrow.vector.VarBinaryVector;
import org.apache.arrow.vector.VectorSchemaRoot;
import org.apache.arrow.vector.types.pojo.ArrowType;
import org.apache.arrow.vector.types.pojo.Field;
import org.apache.arrow.vector.types.pojo.Schema;

/** An open DoPut. */
final class PutStream {
  private static final Schema PAYLOADS =
      new Schema(List.of(Field.notNullable("value", new ArrowType.Binary())));
  private static final int STREAM_S = 60; // a longer one ends, and is opened again

  final JsonNode ready;
  boolean isSent; // whether what was to be written last may have been written
  private final VectorSchemaRoot rows = VectorSchemaRoot.create(PAYLOADS, Proxies.MEMORY);
  private final SyncPutListener answers = new SyncPutListener();
  private final FlightClient.ClientStreamListener stream;
  private long sent;

  /** Opens it at one proxy, and waits until it is ready. */
  PutStream(Proxies proxies, String location, Map<String, Object> command) throws Exception {
    proxies.act(location, "health", Map.of()); // a stream to one that is frozen would wait
    List<String> silent = new ArrayList<>(proxies.silent());
    silent.remove(location);
    if (!silent.isEmpty()) {
      command.put("unreachable", silent);
    }
    FlightDescriptor descriptor =
        FlightDescriptor.command(Proxies.JSON.writeValueAsBytes(command));
    stream =
        proxies
            .connect(location)
            .startPut(
                descriptor, rows, answers, CallOptions.timeout(STREAM_S, TimeUnit.SECONDS));
    try {
      ready = receive().get("ready");
    } catch (Exception error) {
      close();
      throw error;
    }
  }

  void close() {
    stream.error(CallStatus.CANCELLED.toRuntimeException());
    rows.close();
  }

  /** Waits for an answer, but not for ever. */
  private JsonNode receive() throws Exception {
    try (PutResult answer = answers.poll(Proxies.ANSWER_S, TimeUnit.SECONDS)) {
      if (answer == null) {
        throw Proxies.Refusal.silence();
      }
      ArrowBuf buffer = answer.getApplicationMetadata();
      byte[] bytes = new byte[(int) buffer.readableBytes()];
      buffer.getBytes(0, bytes);
      return Proxies.JSON.readTree(bytes);
    } catch (ExecutionException error) {
      if (error.getCause() instanceof FlightRuntimeException refused) {
        throw Proxies.Refusal.of(refused);
      }
      throw error;
    }
  }

  /** Writes records, and returns where the last one is once they are durable; "" if not known. */
  String append(List<String> values, Long sequence, boolean isLast) throws Exception {
    VarBinaryVector column = (VarBinaryVector) rows.getVector(0);
    for (int row = 0; row < values.size(); row++) {
      column.setSafe(row, values.get(row).getBytes(StandardCharsets.UTF_8));
    }
    rows.setRowCount(values.size());
    isSent = true;
    if (sequence == null) {
      stream.putNext();
    } else {
      byte[] beside = Proxies.JSON.writeValueAsBytes(Map.of("sequence", sequence));
      ArrowBuf buffer = Proxies.MEMORY.buffer(beside.length); // the stream frees it
      buffer.writeBytes(beside);
      stream.putNext(buffer);
    }
    if (isLast) {
      stream.completed();
    }
    sent += values.size();
    while (true) {
      JsonNode reply = receive();
      if (reply.has("draining")) {
        isSent = false; // what was not acknowledged was not written
        String location = reply.at("/draining/location").asText(null);
        throw new Proxies.Refusal("draining", location, null, true, false);
      }
      if (reply.path("acked").asLong() == sent) {
        return reply.path("dlsn").asText("");
      }
    }
  }
}
